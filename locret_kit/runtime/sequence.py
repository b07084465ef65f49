"""One text: its prompt, piece by piece, and then its answer, token by token. Who computes is not asked here."""

import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from ..cache.bounded import BoundedCache
from .sampling import Chooser, Sampling
from .thoughts import Thought

BLOCK = 256
"""Tokens of a prompt in one forward, at most, where the logits of each are wanted: they are as many as the vocabulary."""


@dataclass(eq=False)
class Request:
    """One prompt and how it is answered."""

    ids: abc.Sequence[int]
    max_new_tokens: int = 64
    """0 only reads the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    top_logprobs: int | None = field(default=None, kw_only=True)
    """Number of the likeliest tokens whose log-probabilities come with each token's own; None for neither."""
    prompt_logprobs: bool = field(default=False, kw_only=True)
    """Whether log-probabilities of the prompt's tokens are wanted too. Each depends on the slots that the cache had
    kept at that point."""
    choose: Callable[[Tensor], int] | None = field(default=None, kw_only=True)
    """The next token by its logits ``[V]``, such as one that is forced; by default ``sampling`` chooses."""
    on_prompt: Callable[[Tensor, int], None] | None = field(default=None, kw_only=True)
    """Takes the logits ``[T, V]`` (float32) of each piece of the prompt, and the tokens read with it, where they are wanted."""
    thought: Thought | None = field(default=None, kw_only=True)
    """Watches the answer's thought; None where the model has none."""


Logprobs = list[tuple[int, float]]
"""Token ids with the natural logarithms of their probabilities, by the model's own distribution (before temperature and
penalties): the likeliest, best first, and the token that was chosen."""


@dataclass(eq=False)
class Sequence:
    """A request that runs.

    Attributes:
        written: the answer's ids so far, those before an error too. stopped_by: the id that ended it, if one did.
        finish_reason: "stop", "length", "read" (nothing more was asked), "error",
            "cancelled", or None before the end.
        logprobs: of each token, where they are asked for. prompt_logprobs: of the prompt's tokens from its second on.
    """

    request: Request
    written: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    stopped_by: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    cache: BoundedCache | None = None
    prompt_read: int = 0
    """Tokens of the prompt that the cache had read before."""
    evictions_before: int = 0
    """Evictions of the cache when it was given."""
    began: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    alone: bool = False
    """Whether its forwards hold no other text; they may then cross boundaries, where its cache cuts them."""
    choose: Callable[[Tensor], int] | None = None
    logits_V: Tensor | None = None
    """Logits after the prompt's last token, in float32."""
    text: Tensor | None = None
    """The prompt on the model's device: one copy for all pieces, since for every copy the host waits."""

    @property
    def tokens(self) -> list[int]:
        """The answer's ids so far. Raises the error that ended it: what was written before is no answer."""
        if self.error is not None:
            raise self.error
        return self.written

    @property
    def reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.written

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the logits of all tokens of the prompt are wanted."""
        return self.request.prompt_logprobs or self.request.on_prompt is not None

    @property
    def remaining(self) -> int:
        """Tokens of the prompt to read."""
        seen = self.cache.get_seq_length() if self.cache is not None else 0
        return 0 if self.finish_reason is not None else max(0, len(self.request.ids) - seen)

    @property
    def piece_len(self) -> int:
        """Tokens of the next piece of the prompt."""
        cache = self.cache
        assert cache is not None
        if not cache.context.description.in_pieces:
            return self.remaining
        done, cut = cache.get_seq_length(), cache.handler.in_blocks and not self.alone
        step = min(cache.schedule.until_boundary(done) if cut else cache.schedule.piece(done), self.remaining)
        return min(step, BLOCK) if self.wants_prompt_logits else step

    def start(self, cache: BoundedCache, device: torch.device) -> None:
        """Give it its cache: an empty one, or one that has read the prompt's beginning.

        Raises:
            ValueError: the cache has read all of the prompt.
        """
        seen, request = cache.get_seq_length(), self.request
        if seen >= len(request.ids):
            raise ValueError(f"the cache has seen {seen} tokens already, the prompt has {len(request.ids)}")
        self.cache, self.prompt_read, self.evictions_before = cache, seen, cache.counters.evictions
        self.choose = request.choose or Chooser(request.sampling, request.seed, device, request.ids)
        self.text = torch.as_tensor(request.ids, dtype=torch.long, device="cpu").to(device)

    def next_piece(self) -> Tensor:
        """Tokens ``[T]`` of the prompt's next piece."""
        assert self.cache is not None and self.text is not None
        done = self.cache.get_seq_length()
        at = self.cache.state.prompt_positions(done, done + self.piece_len)
        return self.text[at.start : at.stop] if isinstance(at, range) else self.text[torch.tensor(at, device="cpu")]

    def advance(self, logits_V: Tensor, stop: frozenset[int]) -> bool:
        """Continue after a forward of its new tokens, with the logits ``[V]`` of the last one. Returns whether it
        has one more token or has ended.

        Raises RuntimeError at logits that are not finite.
        """
        if self.reading:
            assert self.cache is not None
            self.cache.state.start_reread()
            if self.remaining:
                return False
            logits_V = self.logits_V = logits_V.float()
            if not self.request.max_new_tokens:
                self.end("read")
                return True
        self.take(logits_V.float(), stop)
        return True

    def note_prompt(self, logits_TV: Tensor) -> None:
        """Note the log-probabilities of the prompt tokens after those just read, from their logits ``[T, V]``. A
        second reading is not noted."""
        assert self.cache is not None
        if self.cache.reread_positions:
            return
        end = self.cache.get_seq_length()
        if self.request.on_prompt is not None:
            self.request.on_prompt(logits_TV, end)
        if self.request.prompt_logprobs:
            following = self.request.ids[end - len(logits_TV) + 1 : end + 1]
            for logits_V, token in zip(logits_TV[: len(following)], following, strict=True):  # nothing follows the last
                self.prompt_logprobs.append(self._logprob(logits_V, token))

    def _logprob(self, logits_V: Tensor, token: int) -> Logprobs:
        """The log-probability of a token, after those of the likeliest."""
        logprobs_V = logits_V.float().log_softmax(-1)
        top = logprobs_V.topk(min(self.request.top_logprobs or 0, len(logprobs_V)))
        return [*zip(top.indices.tolist(), top.values.tolist(), strict=True), (token, float(logprobs_V[token]))]

    def take(self, logits_V: Tensor, stop: frozenset[int]) -> bool:
        """Choose the next token; False where it is one of ``stop``, which ends the answer.

        Raises:
            RuntimeError: no probabilities to draw from: logits that are not finite.
        """
        assert self.choose is not None
        thought = self.request.thought
        forced = None if thought is None else thought.forced()
        token = self.choose(logits_V) if forced is None else forced
        if forced is not None and isinstance(self.choose, Chooser):
            self.choose.note(token)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.began
        if token in stop:
            self.stopped_by = [token]
            self.end("stop")
            return False
        if self.request.top_logprobs is not None:
            self.logprobs.append(self._logprob(logits_V, token))
        self.written.append(token)
        if thought is not None:
            thought.take(token)
        count = len(self.written) if thought is None else thought.counted()
        if count >= self.request.max_new_tokens:
            self.end("length")
        return True

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Let it leave; its cache is free."""
        self.finish_reason, self.error = reason, error
        self.cache = self.text = None
        self.ended_s = time.perf_counter() - self.began


# ---- whose prompt is read next, so that nobody waits long for another -----------------------------------------------

# A bound in tokens of work, which holds on any machine.
#
# A prompt enters when it can be read to its end while at most ``PATIENCE`` chunks of other prompts are read; until then it
# waits outside. Within that bound shorter prompts come first. Books (prompts in the background, and those of more than ``LONG``
# chunks) are read in between: after at most ``PATIENCE`` chunks of others nobody enters before a book has had a chunk.


PATIENCE = 3
"""Chunks of other prompts between a prompt's entry and its end, and between two tokens of an answer, at most."""
LONG = 16
"""Most chunks of a prompt that is no book. A longer one is a book until this number of its chunks is left."""


@dataclass(eq=False)
class QueueEntry:
    """A prompt that has entered.

    Attributes:
        background: a book of any length.
        passed: tokens of others that were read since it entered; of a book, since its last piece.
        taken: its own tokens in the forward that is being made up.
    """

    prompt: Sequence
    background: bool
    passed: int = 0
    taken: int = 0


class PromptScheduler:
    """The order of reading prompts, with a bounded wait.

    Args:
        chunk: tokens of a chunk. piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
    """

    def __init__(self, chunk: int, piece: int) -> None:
        self.patience, self.long = PATIENCE * chunk, LONG * chunk
        self.piece = min(piece, self.patience)
        self._order: list[QueueEntry] = []
        self._books: list[QueueEntry] = []

    def takes(self, left: int, *, background: bool = False) -> bool:
        """Whether a prompt with ``left`` tokens to read may enter now."""
        return background or left > self.long or self._place(left) is not None

    def enter(self, prompt: Sequence, left: int, *, background: bool = False) -> None:
        """A prompt enters; ``takes`` has said that it may."""
        place = None if background or left > self.long else self._place(left)
        if place is None:
            self._books.append(QueueEntry(prompt, background))
        else:
            self._order.insert(place, QueueEntry(prompt, background))

    def pick(self, reading: abc.Sequence[Sequence]) -> list[Sequence]:
        """The prompts of the next forward, a piece of each. ``reading``: those not at their end yet."""
        present = {id(prompt) for prompt in reading}
        self._order = [entry for entry in self._order if id(entry.prompt) in present]
        self._books = [entry for entry in self._books if id(entry.prompt) in present]
        for book in [one for one in self._books if not one.background and one.prompt.remaining <= self.long]:
            if (place := self._place(book.prompt.remaining, promoted=book)) is not None:
                self._books.remove(book)
                self._order.insert(place, book)
                book.passed = 0
        self._books.sort(key=lambda book: -book.passed)
        chosen, room = list[QueueEntry](), self.piece
        for entry in [*self._order, *self._books]:
            if chosen and (entry.prompt.piece_len > room or not self._affords(entry)):
                break
            chosen.append(entry)
            room -= entry.prompt.piece_len
            self._count(entry)
        for entry in chosen:
            entry.taken = 0
        return [entry.prompt for entry in chosen]

    def _ahead(self) -> Iterator[tuple[QueueEntry, int]]:
        """Prompts in their order, each with the tokens of others that it will have let pass when its own turn comes."""
        before = 0
        for entry in self._order:
            yield entry, entry.passed + before
            before += entry.prompt.remaining - entry.taken

    def _place(self, left: int, promoted: QueueEntry | None = None) -> int | None:
        """Place in the order for a prompt, or a book that is ``promoted``; None where someone would wait too long."""
        if any(book.passed >= self.patience and book.prompt.remaining for book in self._books if book is not promoted):
            return None
        place = len(self._order)
        for entry, ahead in reversed(list(self._ahead())):
            if entry.prompt.remaining <= left or ahead + left > self.patience:
                break
            place -= 1
        # A forward's room is left, so that it may be shared with those behind.
        before = sum(entry.prompt.remaining for entry in self._order[:place])
        return place if before <= self.patience - self.piece else None

    def _affords(self, chosen: QueueEntry) -> bool:
        """Whether those before a prompt can let its next piece pass."""
        before = takewhile(lambda one: one[0] is not chosen, self._ahead())
        return all(ahead + chosen.prompt.piece_len <= self.patience for _, ahead in before)

    def _count(self, chosen: QueueEntry) -> None:
        """A piece of one prompt passes all others."""
        chosen.taken = chosen.prompt.piece_len
        for entry in (*self._order, *self._books):
            entry.passed += chosen.taken if entry is not chosen else 0
        if chosen in self._books:
            chosen.passed = 0
