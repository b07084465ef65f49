"""Positions that rotate cached keys, and the tables of cos and sin, each made once per forward."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backbones.rope import Rope
from ..settings import read_positions

# One formula for the position of a cached key, under three names.
#
# The slot of token ``t`` with rank ``r`` in its head, after ``n`` tokens, has position ``max(r, t - max(0, n - span))``: true
# distances among the newest ``span`` tokens, and below that ranks, so no position exceeds ``max(span, rows)``.
#
# - ``original``: no span; a token keeps its place in the text.
# - ``compact``: a span of 0; the rank alone. Source: Locret's published code.
# - ``clipped(span)``: in between. Inside the span it is ``original``; a long text is read far past the backbone's window
#   like ``compact``, and what is near keeps its distance.


@dataclass(frozen=True)
class Positions:
    """Placement of cached keys."""

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
        """Positions (int64) for rotation after ``seen`` tokens, of the broadcast shape of ``rank`` and ``position``.
        Not for ``original``."""
        before = seen - (self.span or 0)  # tokens before the newest span
        moved = before.clamp(min=0) if isinstance(before, Tensor) else max(0, before)
        return torch.maximum(rank, position.long() - moved)

    def next_place(self, rows_BH: Tensor, seen: int | Tensor) -> Tensor:
        """Position ``[B, H]`` (int64) of the next token, for heads with ``rows`` rows."""
        if self.span is None:
            return torch.zeros_like(rows_BH) + seen
        # At least its true distance from the span's start, at least its rank.
        low = seen.clamp(max=self.span) if isinstance(seen, Tensor) else min(seen, self.span)
        return rows_BH.clamp(min=low)


STEP = 64
"""Tables whose length differs from head to head are made for lengths rounded up to this, so that few are needed."""


class RotationTables:
    """The tables of one forward: layers of a device that rotate alike share them. All are ``(cos, sin)``, ``[..., R]``."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget the tables of the last forward."""
        self._made.clear()

    def made(self) -> list[tuple[Tensor, Tensor]]:
        """All tables: pairs of cos and sin of shape ``[length, R]``."""
        return list(self._made.values())

    def between(self, rope: Rope, start: int | Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """``[length, R]`` of the positions from ``start`` on, with the dtype and device of ``like``. Those from a number of
        the device on are not remembered: it changes."""
        if isinstance(start, Tensor):
            return rope.tables(start + torch.arange(length, device=like.device), like.dtype)
        key = id(rope), start, length, like.device
        if key not in self._made:
            pos_T = torch.arange(start, start + length, device=like.device)
            self._made[key] = rope.tables(pos_T, like.dtype)
        return self._made[key]

    def upto(self, rope: Rope, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of shape ``[>= length, R]`` of the positions from 0 on."""
        return self.between(rope, 0, -(-length // STEP) * STEP, like)

    def first(self, rope: Rope, n: int, like: Tensor, ragged: bool) -> tuple[Tensor, Tensor]:
        """``[n, R]`` of the ranks of a head's ``n`` rows; ``ragged`` heads have many lengths."""
        # Ragged heads slice one rounded-up table; heads of equal length need one table of their own length.
        cos, sin = self.upto(rope, n, like) if ragged else self.between(rope, 0, n, like)
        return cos[:n], sin[:n]

    def at(self, rope: Rope, place: Tensor, span: int | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """``[*place, R]`` of positions below the larger of ``span`` and the rows of ``place [..., rows]``."""
        # [*place] -> [*place, R]
        cos, sin = self.upto(rope, max(span or 0, place.shape[-1]), like)
        return cos[place], sin[place]
