"""Where evictions happen, in integers. No torch.

Source: Locret, algorithm 1. Boundaries stand at every multiple of ``chunk`` and where the last ``local_len`` tokens of the
prompt begin; the tail itself and the first decoded tokens are appended without eviction.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The integers of a bounded prefill, all in tokens (or slots of one key/value head)."""

    budget: int
    chunk: int
    stabilizers: int = 0
    local_len: int = 0
    prompt_length: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("budget", 1), ("chunk", 1), ("stabilizers", 0), ("local_len", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        for name in ("stabilizers", "local_len"):
            if getattr(self, name) >= self.budget:
                raise ValueError(f"{name}={getattr(self, name)} must be below budget={self.budget}")
        if self.prompt_length is not None and self.prompt_length < 1:
            raise ValueError(f"prompt_length={self.prompt_length} must be at least 1")

    @classmethod
    def scaled(
        cls, budget: int, chunk: int, prompt_length: int | None, stabilizers: int | None, local_len: int | None
    ) -> Schedule:
        """Fill what was not given: an eighth of the budget as stabilizers, at most 64 held-back tokens."""
        return cls(
            budget=budget,
            chunk=chunk,
            stabilizers=budget // 8 if stabilizers is None else stabilizers,
            local_len=min(64, budget // 4) if local_len is None else local_len,
            prompt_length=prompt_length,
        )

    @property
    def capacity(self) -> int:
        """Rows to preallocate for each key/value head."""
        return self.budget + self.chunk

    @property
    def body(self) -> int | None:
        """Prompt tokens before the held-back tail; None while the prompt's length is unknown."""
        return None if self.prompt_length is None else max(0, self.prompt_length - self.local_len)

    def until_boundary(self, seen: int) -> int:
        """Tokens from ``seen`` to the next boundary (at least 1)."""
        if self.body is not None and seen >= self.body:
            left = (
                self.prompt_length or 0
            ) - seen  # the tail goes in blocks too: a windowed layer has room for one chunk
            return min(left, self.chunk) if left > 0 else 1
        to_chunk = self.chunk - seen % self.chunk
        return to_chunk if self.body is None else min(to_chunk, self.body - seen)

    def is_last(self, seen: int) -> bool:
        """Whether the boundary at ``seen`` is the one before the tail, where nothing is protected as a stabilizer."""
        return self.body is not None and seen >= self.body

    def keep_at(self, seen: int, rows: int) -> int | None:
        """Slots to keep after ``seen`` tokens with ``rows`` slots held; None where nothing is to be evicted.

        The tail counts: before it the cache is cut to ``budget - tail``, so that prompt and tail fill the budget.
        """
        if self.body is None:
            return self.budget if seen % self.chunk == 0 and rows > self.budget else None
        if self.prompt_length is not None and self.prompt_length <= self.budget:
            return None
        if seen == self.body:
            keep = self.budget - (self.prompt_length or 0) + self.body
            return keep if rows > keep else None
        if seen < self.body and seen % self.chunk == 0 and rows > self.budget:
            return self.budget
        return None
