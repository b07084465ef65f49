"""Rows in few bits of one layer whose heads hold different numbers of slots: the form of ``quantised``, laid out as in
``ragged``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .groups import table_size
from .quantised import QuantisedLayer
from .ragged import RaggedLayer


class RaggedQuantisedLayer(QuantisedLayer, RaggedLayer):
    """Rows of one layer in few bits, ``rows`` a head on average.

    Codes, values' levels and the scratch are flat. All heads of a batch item share one table of key groups, since nobody
    knows how many a head will need; a group has rows of one head alone. The newest ``tail`` rows of each head, or all that it
    has, are held as they came.
    """

    longest = RaggedLayer.longest
    slots = RaggedLayer.slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._lay_out(torch.zeros(self.B * self.H, dtype=torch.int64, device=self.device))

    def buffer(self, name: str) -> Tensor:
        if name in ("keys", "values"):
            self._open()
            return self._lent(name)
        return super().buffer(name)

    def _tables(self) -> tuple[int, int]:
        return 1, table_size(self.capacity, self.H, self.spare, self.group_rows)

    def _lent(self, name: str) -> Tensor:
        return super()._lent(name).flatten(0, 2)

    def _written(self, new: slice | Tensor) -> Any:
        return new

    def _newest(self, older: int, newer: int) -> Any:
        rows = [
            torch.arange(start + max(0, length - older), start + max(0, length - newer))
            for start, length in self._stretches
        ]
        return torch.cat(rows).to(self.device)

    def _held(self) -> Any:
        return self._newest(self.longest, 0).view(self.B, 1, -1)

    def _heads(self) -> tuple[Tensor, int]:
        head = torch.arange(self.H, device=self.device).repeat(self.B)
        total = self.B * self.H * self.rows
        return head.repeat_interleave(self.lengths, output_size=total).view(self.B, 1, -1), self.H

    def _in_tail(self) -> Any:
        rows = [torch.arange(min(self.tail, length)) for _, length in self._stretches]
        head = torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)]).to(self.device)
        return head // self.H, head % self.H, torch.cat(rows).to(self.device)

    def _next_in_tail(self) -> Any:
        head = torch.arange(self.B * self.H, device=self.device).view(self.B, self.H)
        return head // self.H, head % self.H, self._tails().long()

    def _tails(self) -> Tensor:
        return self.lengths.clamp(max=self.tail).view(self.B, self.H).int()
