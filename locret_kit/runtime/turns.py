"""Whose prompt is read next, so that nobody waits long for another: a bound in tokens of work, which holds on any machine.

A prompt enters when it can be read to its end while at most ``PATIENCE`` chunks of other prompts are read; until then it
waits outside. Within that bound shorter prompts come first. Books (documents, and prompts of more than ``LONG`` chunks) are
read in between: after at most ``PATIENCE`` chunks of others nobody enters before a book has had a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

PATIENCE = 3
"""Chunks of other prompts between a prompt's entry and its end, and between two tokens of an answer, at most."""
LONG = 16
"""Chunks of a prompt, at most; what is longer is a book until so many are left."""


class Reading(Protocol):
    """A prompt that is being read."""

    @property
    def left(self) -> int:
        """Tokens to read; 0 when it has ended, in whatever way."""

    @property
    def step(self) -> int:
        """Tokens of the next piece."""

    @property
    def aside(self) -> bool:
        """Whether it is a book of whatever length."""


R = TypeVar("R", bound=Reading)


class Turns(Generic[R]):
    """The order of prompts.

    Args:
        chunk: tokens of a chunk. piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
    """

    def __init__(self, chunk: int, piece: int) -> None:
        self.patience, self.long = PATIENCE * chunk, LONG * chunk
        self.piece = min(piece, self.patience)
        self._order: list[R] = []
        self._books: list[R] = []
        self._taken: dict[int, int] = {}  # by the forward that is made up
        self._passed: dict[int, int] = {}  # of those in the order since they entered, of books since their last piece

    def takes(self, left: int, *, aside: bool = False) -> bool:
        """Whether a prompt with ``left`` tokens to read may enter now."""
        return aside or left > self.long or self._place(left) is not None

    def enter(self, text: R, left: int) -> None:
        """A prompt enters; ``takes`` has said that it may."""
        place = None if text.aside or left > self.long else self._place(left)
        if place is None:
            self._books.append(text)
        else:
            self._order.insert(place, text)
        self._passed[id(text)] = 0

    def pick(self, reading: Sequence[R]) -> list[R]:
        """The prompts of the next forward, each with one piece (``step`` tokens). ``reading``: those not at their end yet."""
        here = {id(text) for text in reading}
        self._order = [text for text in self._order if id(text) in here]
        self._books = [text for text in self._books if id(text) in here]
        for book in [book for book in self._books if not book.aside and book.left <= self.long]:
            place = self._place(book.left, waits=book)
            if place is not None:
                self._books.remove(book)
                self._order.insert(place, book)
                self._passed[id(book)] = 0
        self._books.sort(key=lambda book: -self._passed[id(book)])
        chosen: list[R] = []
        self._taken = {}
        room = self.piece
        for text in [*self._order, *self._books]:
            if chosen and (text.step > room or not self._affords(text)):
                break
            chosen.append(text)
            room -= text.step
            self._count(text)
        self._taken = {}
        self._passed = {key: passed for key, passed in self._passed.items() if key in here}
        return chosen

    def _ahead(self) -> Iterator[tuple[R, int]]:
        """Prompts in their order, each with the tokens of others that it will have let pass when its own turn comes."""
        before = 0
        for text in self._order:
            yield text, self._passed[id(text)] + before
            before += text.left - self._taken.get(id(text), 0)

    def _place(self, left: int, waits: R | None = None) -> int | None:
        """Where in the order a prompt can enter; None where someone would wait too long."""
        if any(self._passed[id(book)] >= self.patience and book.left for book in self._books if book is not waits):
            return None
        place = len(self._order)
        for text, ahead in reversed(list(self._ahead())):
            if text.left <= left or ahead + left > self.patience:
                break
            place -= 1
        # A forward's room is left, so that it may be shared with those behind.
        return place if sum(text.left for text in self._order[:place]) <= self.patience - self.piece else None

    def _affords(self, text: R) -> bool:
        """Whether those before a prompt can let its next piece pass."""
        for other, ahead in self._ahead():
            if other is text:
                break
            if ahead + text.step > self.patience:
                return False
        return True

    def _count(self, text: R) -> None:
        """A piece of one prompt passes all others."""
        self._taken[id(text)] = text.step
        for other in (*self._order, *self._books):
            self._passed[id(other)] += text.step if other is not text else 0
        if any(text is book for book in self._books):
            self._passed[id(text)] = 0
