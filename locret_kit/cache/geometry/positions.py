"""By which position a cached key is rotated: one formula, three names.

The slot of token ``t`` with rank ``r`` in its head, after ``n`` tokens, has position ``max(r, t - max(0, n - span))``: true
distances among the newest ``span`` tokens, and below that ranks, so no position exceeds ``max(span, rows)``.

- ``original``: no span; a token keeps its place in the text.
- ``compact``: a span of 0; the rank alone. Source: Locret's published code.
- ``clipped(span)``: in between. Inside the span it is ``original``; a long text is read far past the backbone's window
  like ``compact``, and what is near keeps its distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...settings import read_positions


@dataclass(frozen=True)
class Positions:
    """How cached keys are placed."""

    span: int | None
    """Newest tokens with true distances; None is all of them."""

    @classmethod
    def parse(cls, text: str, window: int) -> Positions:
        """``compact``, ``original``, ``clipped(span)``, or ``clipped`` alone: half of the backbone's ``window``.

        Raises:
            ValueError: see `read_positions`.
        """
        name, span = read_positions(text)
        if name == "clipped":
            return cls(max(1, window // 2) if span is None else span)
        return cls(0 if name == "compact" else None)

    @property
    def by_rank(self) -> bool:
        """Whether the rank alone decides, the same in every head of equal length."""
        return self.span == 0

    def largest(self, rows: int, tokens: int | None) -> int:
        """One more than the largest position there will be, with at most ``rows`` rows in a head and ``tokens`` tokens."""
        if self.span is None:
            return rows if tokens is None else tokens
        most = max(self.span, rows)
        return most if tokens is None else min(most, tokens)

    def place(self, rank: Tensor, position: Tensor, seen: int | Tensor) -> Tensor:
        """Positions (int64) to rotate by after ``seen`` tokens; ``rank`` and ``position`` broadcast. Not for ``original``."""
        before = seen - (self.span or 0)  # tokens before the newest span
        moved = before.clamp(min=0) if isinstance(before, Tensor) else max(0, before)
        return torch.maximum(rank, position.long() - moved)

    def next_place(self, rows_BH: Tensor, seen: int | Tensor) -> Tensor:
        """Position ``[B, H]`` (int64) of the next token, for heads with so many rows."""
        if self.span is None:
            return torch.zeros_like(rows_BH) + seen
        # At least its true distance from the span's start, at least its rank.
        low = seen.clamp(max=self.span) if isinstance(seen, Tensor) else min(seen, self.span)
        return rows_BH.clamp(min=low)
