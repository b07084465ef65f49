"""Places of evictions in a text, in integers. No torch.

Source: Locret, algorithm 1. Boundaries stand at every multiple of ``chunk`` and where the last ``local_len`` tokens of the
prompt begin; the tail itself and the first decoded tokens are appended without eviction. In the one-shot form the whole
prompt is one chunk without a tail.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

from ..settings import INT32_MAX, Resolved
from .storage.rows import BoundedLayer

PIECE = 512
"""Tokens a forward takes at most in the one-shot form, whose chunk is the prompt."""


class Due(NamedTuple):
    """The next block of a layer, and the cuts around it."""

    evict_before: int | None
    """Rows to keep before the block, which has no room otherwise; None where nothing moves."""
    tokens: int
    """Length of the block."""
    evict_after: int | None
    """Rows to keep after it; None where nothing is evicted."""
    final: bool
    """Whether that is the eviction before the tail, which protects no stabilizers: the tail follows the newest slots."""


@dataclass(frozen=True)
class Schedule:
    """The integers of a bounded prefill, all in tokens (or slots of one key/value head)."""

    budget: int
    chunk: int
    stabilizers: int = 0
    local_len: int = 0
    prompt_length: int | None = None
    decode_every: int | None = None
    """Decoded tokens between evictions; None evicts only when the buffers are full."""
    one_shot: bool = False
    """Whether there is a single eviction, when the whole prompt has been read."""

    def __post_init__(self) -> None:
        if self.capacity > INT32_MAX:
            raise ValueError(f"budget+chunk={self.capacity} must be at most {INT32_MAX} (32-bit positions)")
        for name in ("stabilizers", "local_len"):
            if getattr(self, name) >= self.budget:
                raise ValueError(f"{name}={getattr(self, name)} must be below budget={self.budget}")
        if self.prompt_length is not None and self.prompt_length < 1:
            raise ValueError(f"prompt_length={self.prompt_length} must be at least 1")
        # The chunk of the one-shot form is the prompt; buffers that are full sooner are cut sooner.
        if self.decode_every is not None and not 1 <= self.decode_every <= (INT32_MAX if self.one_shot else self.chunk):
            raise ValueError(f"decode_every={self.decode_every} must be from 1 to chunk={self.chunk}")
        if self.decode_every is not None and self.prompt_length is None:
            raise ValueError(f"decode_every={self.decode_every} needs prompt_length: it counts from the prompt's end")

    @classmethod
    def of(cls, settings: Resolved, prompt_length: int | None) -> Self:
        """The schedule of a prompt of ``prompt_length`` tokens; None is an unknown length."""
        names = ("budget", "chunk", "stabilizers", "local_len", "decode_every", "one_shot")
        return cls(prompt_length=prompt_length, **{name: getattr(settings, name) for name in names})

    @property
    def capacity(self) -> int:
        """Rows to preallocate for each key/value head."""
        return self.budget + self.chunk

    @property
    def steady(self) -> tuple[int, int] | None:
        """Tokens of a chunk and rows, its own included, of the chunks over a full cache; None in a prompt without such."""
        short = self.body is not None and self.body < self.capacity
        return None if self.one_shot or short else (self.chunk, self.capacity)

    @property
    def body(self) -> int | None:
        """Prompt tokens before the held-back tail; None while the prompt's length is unknown."""
        return None if self.prompt_length is None else max(0, self.prompt_length - self.local_len)

    @property
    def tail(self) -> int:
        """Prompt tokens that are held back."""
        return 0 if self.prompt_length is None else min(self.local_len, self.prompt_length)

    def safe(self, tokens: int) -> int:
        """Tokens of a beginning of ``tokens`` tokens that every longer prompt reads alike: whole chunks, the last of them
        before the eviction that precedes the tail."""
        if self.one_shot:
            return tokens // PIECE * PIECE
        return max(0, tokens - self.local_len) // self.chunk * self.chunk

    def piece(self, seen: int) -> int:
        """Tokens that a prefill feeds the model next. A later turn is fed by chunks: evictions cut them as they must."""
        if self.prompt_length is not None and seen >= self.prompt_length:
            return PIECE if self.one_shot else self.chunk
        # A forward ends at a boundary: then nothing is cut inside of it.
        step = self.until_boundary(seen)
        return min(step, PIECE) if self.one_shot else step

    def until_boundary(self, seen: int) -> int:
        """Tokens from ``seen`` to the next boundary (at least 1)."""
        if self.body is not None and seen >= self.body:
            left = (self.prompt_length or 0) - seen
            return min(left, self.chunk) if left > 0 else 1  # a windowed layer has room for one chunk
        to_chunk = self.chunk - seen % self.chunk
        return to_chunk if self.body is None else min(to_chunk, self.body - seen)

    def blocks(self, seen: int, tokens: int) -> Iterator[int]:
        """Lengths of the blocks that ``tokens`` new tokens are read in. No block crosses a boundary."""
        while tokens > 0:
            step = min(tokens, self.until_boundary(seen))
            yield step
            seen, tokens = seen + step, tokens - step

    def due(self, rows: BoundedLayer, budget: int, tokens: int, *, after_forward: bool = False) -> Due:
        """The next block of a layer with ``tokens`` more tokens at hand; with 0 tokens, the eviction due now.

        Args:
            budget: the layer's. after_forward: whether evictions wait for the end of a forward, which crosses no boundary.
        """
        # A block ends where the next eviction could fall due.
        step, seen = self.until_boundary(rows.seen), rows.seen
        if self.prompt_length is not None and seen >= self.prompt_length and not after_forward:
            # To the next count of `decode_every` since the prompt's end, whichever turn that falls in.
            every = self.decode_every
            step = self.chunk if every is None else every - (seen - self.prompt_length) % every
            step = max(1, min(self.chunk if rows.grows else rows.capacity - rows.rows, step))
        if rows.window is not None and rows.chunked:
            step = min(step, rows.window - seen % rows.window)
        step, room = min(tokens, step), None
        if rows.window is not None:
            if rows.chunked and seen % rows.window == 0:
                room = 0
            elif rows.rows + step > rows.capacity:
                room = rows.window - 1
            return Due(room, step, None, False)
        if rows.grows:
            return Due(None, step, None, False)
        if rows.rows + step > rows.capacity:
            room = budget
        held = rows.rows if room is None else room
        return Due(room, step, self.keep_at(seen + step, held + step, budget), seen + step == self.body)

    def decoding(self, seen: int) -> bool:
        """Whether the prompt is over."""
        return self.prompt_length is not None and seen > self.prompt_length

    def keep_at(self, seen: int, rows: int, budget: int) -> int | None:
        """Slots to keep after ``seen`` tokens with ``rows`` slots held; None where nothing is to be evicted.

        The tail counts: before it the cache is cut to ``budget - tail``, so that prompt and tail fill the budget.
        ``budget`` is the layer's.
        """
        keep = budget
        if self.decoding(seen):  # every `decode_every` tokens, or before a token for which the buffers have no room
            due = self.decode_every is not None and (seen - (self.prompt_length or 0)) % self.decode_every == 0
        elif self.prompt_length is not None and self.prompt_length <= self.budget:
            due = False
        elif seen == self.body:  # the last boundary leaves room for the tail, which is appended without eviction
            keep, due = budget - self.tail, True
        else:
            due = seen % self.chunk == 0 and (self.body is None or seen < self.body)
        return keep if due and rows > keep else None

    def evictions(self, seen: int, budget: int) -> list[tuple[int, int, bool]]:
        """Every eviction of a layer within the first ``seen`` tokens of a prompt: (tokens seen, slots kept, the last one)."""
        # The same loop as a prefill, on counts.
        done = rows = 0
        events = []
        for step in self.blocks(0, seen):
            done, rows = done + step, rows + step
            keep = self.keep_at(done, rows, budget)
            if keep is not None:
                rows = keep
                events.append((done, keep, done == self.body))
        return events
