"""Rows in few bits of one layer whose heads hold different numbers of slots: the form of ``quantised``, laid out as in
``ragged``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .groups import table_size
from .quantised import QuantisedLayer
from .ragged import RaggedLayer, each_row
from .rows import Index


class RaggedQuantisedLayer(QuantisedLayer, RaggedLayer):
    """Rows of one layer in few bits, ``rows`` a head on average.

    Codes, values' levels and the scratch are flat. All heads of a batch item share one table of key groups, since nobody
    knows how many a head will need; a group has rows of one head alone. The newest ``tail`` rows of each head, or all that it
    has, are held as they came.
    """

    longest = RaggedLayer.longest
    slots = RaggedLayer.slots

    def buffer(self, name: str) -> Tensor:
        if name in ("keys", "values"):
            self._open()
            return self._lent(name)
        return super().buffer(name)

    def _tables(self) -> tuple[int, int]:
        return 1, table_size(self.capacity, self.H, self.spare, self.group_rows)

    def _lent(self, name: str) -> Tensor:
        return super()._lent(name).flatten(0, 2)

    def _written(self, new: slice | Tensor) -> Index:
        return new

    def _next_row(self) -> Tensor:
        return (self.starts + self.lengths).view(self.B, self.H, 1)

    def _newest(self, older: int, newer: int) -> Tensor:
        # Per head [P]: rows from length - older to length - newer; short heads have fewer, or none.
        first, end = ((self.lengths - n).clamp(min=0) for n in (older, newer))
        total = sum(max(0, length - newer) - max(0, length - older) for length in self.head_lengths)
        return each_row(self.starts + first, end - first, total)[1]

    def _held(self) -> Index:
        return self._newest(self.longest, 0).view(self.B, 1, -1)

    def _among(self, held: Index, some_BTN: Tensor) -> Tensor:
        assert isinstance(held, Tensor)
        return held.gather(2, some_BTN)

    def _heads(self) -> tuple[Tensor, int]:
        head, _ = each_row(self.starts, self.lengths, self.B * self.H * self.rows)
        return (head % self.H).view(self.B, 1, -1), self.H

    def _in_tail(self) -> Index:
        count = self.lengths.clamp(max=self.tail)  # [P]: a head may be shorter than the tail
        total = sum(min(self.tail, length) for length in self.head_lengths)
        head, row = each_row(torch.zeros_like(count), count, total)
        return head // self.H, head % self.H, row

    def _tail_shape(self, tail: int, lengths: Sequence[int]) -> tuple[int, ...]:
        return (sum(min(tail, length) for length in lengths),)

    def _next_in_tail(self) -> Index:
        head = torch.arange(self.B * self.H, device=self.device).view(self.B, self.H)
        return head // self.H, head % self.H, self._tails().long()

    def _tails(self) -> Tensor:
        return self.lengths.clamp(max=self.tail).view(self.B, self.H).int()
