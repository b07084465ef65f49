"""By which position a cached key is rotated: one formula, three names.

The slot of token ``t`` with rank ``r`` in its head, after ``n`` tokens, has position ``max(r, t - max(0, n - span))``: true
distances among the newest ``span`` tokens, and below that ranks, so no position exceeds ``max(span, rows)``.

- ``original``: no span; a token keeps its place in the text.
- ``compact``: a span of 0; the rank alone. Source: Locret's published code.
- ``clipped(span)``: in between. Inside the span it is ``original``; a long text is read far past the backbone's window
  like ``compact``, and what is near keeps its distance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ...naming import nearest
from ...settings import INT32_MAX

NAMES = ("compact", "clipped", "original")
_CALL = re.compile(r"^(\w+)(?:\((\d+)\))?$")


@dataclass(frozen=True)
class Positions:
    """How cached keys are placed."""

    span: int | None
    """Newest tokens with true distances; None is all of them."""

    @classmethod
    def parse(cls, text: str, window: int) -> Positions:
        """``compact``, ``original``, ``clipped(span)``, or ``clipped`` alone: half of the backbone's ``window``.

        Raises:
            ValueError: another name, or a span that is missing its meaning.
        """
        match = _CALL.match(text)
        if not match or match[1] not in NAMES or (match[2] and match[1] != "clipped"):
            raise ValueError(
                f"positions={text!r} must be compact, original, clipped or clipped(SPAN).{nearest(text.split('(')[0], NAMES)}"
            )
        if match[2] and (len(match[2]) > 10 or int(match[2]) > INT32_MAX):
            raise ValueError(f"positions={text!r}: the span must be at most {INT32_MAX} tokens")
        if match[1] == "clipped":
            return cls(int(match[2]) if match[2] else max(1, window // 2))
        return cls(0 if match[1] == "compact" else None)

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
