"""Whose prompt is read next, so that nobody waits long for another: a bound in tokens of work, which holds on any machine.

A prompt enters when it can be read to its end while at most ``PATIENCE`` chunks of other prompts are read; until then it
waits outside. Within that bound shorter prompts come first. Books (prompts in the background, and those of more than ``LONG``
chunks) are read in between: after at most ``PATIENCE`` chunks of others nobody enters before a book has had a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

PATIENCE = 3
"""Chunks of other prompts between a prompt's entry and its end, and between two tokens of an answer, at most."""
LONG = 16
"""Chunks of a prompt, at most; what is longer is a book until so many are left."""


class Prompt(Protocol):
    """A prompt that is being read."""

    @property
    def left(self) -> int:
        """Tokens to read; 0 when it has ended, in whatever way."""

    @property
    def step(self) -> int:
        """Tokens of the next piece."""


P = TypeVar("P", bound=Prompt)


@dataclass(eq=False)
class QueueEntry(Generic[P]):
    """A prompt that has entered.

    Attributes:
        background: a book of whatever length.
        passed: tokens of others that were read since it entered; of a book, since its last piece.
        taken: its own tokens in the forward that is being made up.
    """

    prompt: P
    background: bool
    passed: int = 0
    taken: int = 0


class PromptScheduler(Generic[P]):
    """The order in which prompts are read.

    Args:
        chunk: tokens of a chunk. piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
    """

    def __init__(self, chunk: int, piece: int) -> None:
        self.patience, self.long = PATIENCE * chunk, LONG * chunk
        self.piece = min(piece, self.patience)
        self._order: list[QueueEntry[P]] = []
        self._books: list[QueueEntry[P]] = []

    def takes(self, left: int, *, background: bool = False) -> bool:
        """Whether a prompt with ``left`` tokens to read may enter now."""
        return background or left > self.long or self._place(left) is not None

    def enter(self, prompt: P, left: int, *, background: bool = False) -> None:
        """A prompt enters; ``takes`` has said that it may."""
        place = None if background or left > self.long else self._place(left)
        if place is None:
            self._books.append(QueueEntry(prompt, background))
        else:
            self._order.insert(place, QueueEntry(prompt, background))

    def pick(self, reading: Sequence[P]) -> list[P]:
        """The prompts of the next forward, each with one piece (``step`` tokens). ``reading``: those not at their end yet."""
        present = {id(prompt) for prompt in reading}
        self._order = [entry for entry in self._order if id(entry.prompt) in present]
        self._books = [entry for entry in self._books if id(entry.prompt) in present]
        for book in list(self._books):
            if not book.background and book.prompt.left <= self.long:
                place = self._place(book.prompt.left, promoted=book)
                if place is not None:
                    self._books.remove(book)
                    self._order.insert(place, book)
                    book.passed = 0
        self._books.sort(key=lambda book: -book.passed)
        chosen: list[QueueEntry[P]] = []
        room = self.piece
        for entry in [*self._order, *self._books]:
            if chosen and (entry.prompt.step > room or not self._affords(entry)):
                break
            chosen.append(entry)
            room -= entry.prompt.step
            self._count(entry)
        for entry in chosen:
            entry.taken = 0
        return [entry.prompt for entry in chosen]

    def _ahead(self) -> Iterator[tuple[QueueEntry[P], int]]:
        """Prompts in their order, each with the tokens of others that it will have let pass when its own turn comes."""
        before = 0
        for entry in self._order:
            yield entry, entry.passed + before
            before += entry.prompt.left - entry.taken

    def _place(self, left: int, promoted: QueueEntry[P] | None = None) -> int | None:
        """Place in the order for a prompt, or a book that is ``promoted``; None where someone would wait too long."""
        if any(book.passed >= self.patience and book.prompt.left for book in self._books if book is not promoted):
            return None
        place = len(self._order)
        for entry, ahead in reversed(list(self._ahead())):
            if entry.prompt.left <= left or ahead + left > self.patience:
                break
            place -= 1
        # A forward's room is left, so that it may be shared with those behind.
        before = sum(entry.prompt.left for entry in self._order[:place])
        return place if before <= self.patience - self.piece else None

    def _affords(self, chosen: QueueEntry[P]) -> bool:
        """Whether those before a prompt can let its next piece pass."""
        for entry, ahead in self._ahead():
            if entry is chosen:
                break
            if ahead + chosen.prompt.step > self.patience:
                return False
        return True

    def _count(self, chosen: QueueEntry[P]) -> None:
        """A piece of one prompt passes all others."""
        chosen.taken = chosen.prompt.step
        for entry in (*self._order, *self._books):
            entry.passed += chosen.taken if entry is not chosen else 0
        if chosen in self._books:
            chosen.passed = 0
