"""Tables of cos and sin by which rows are rotated, each made once a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from ...backbones.rope import Rope

STEP = 64
"""Tables whose length differs from head to head are made for lengths rounded up to this, so that few are needed."""


class RotationTables:
    """The tables of one forward: layers that rotate alike share them. All of them are ``(cos, sin)``, ``[..., R]``."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget the tables of the last forward."""
        self._made.clear()

    def made(self) -> list[tuple[Tensor, Tensor]]:
        """All of them."""
        return list(self._made.values())

    def between(self, rope: Rope, start: int | Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """``[length, R]`` of the positions from ``start`` on, with the dtype and device of ``like``. Those from a number of
        the device on are not remembered: it changes."""
        if isinstance(start, Tensor):
            return rope.tables(start + torch.arange(length, device=like.device), like.dtype)
        key = (id(rope), start, length)
        if key not in self._made:
            pos_T = torch.arange(start, start + length, device=like.device)
            self._made[key] = rope.tables(pos_T, like.dtype)
        return self._made[key]

    def each(self, rope: Rope, places: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """``[places, R]`` of such positions."""
        key = (id(rope), -1, *places)
        if key not in self._made:
            self._made[key] = rope.tables(torch.tensor(places, device=like.device), like.dtype)
        return self._made[key]

    def upto(self, rope: Rope, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """``[>= length, R]`` of the positions from 0 on."""
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
