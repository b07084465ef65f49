"""Rows of one layer whose heads hold different numbers of slots, as adaptive allocations ask for.

Letters beside the legend's: P = B * H, the heads of the whole batch, item after item; N, rows of all of them, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.compact import kept_rows
from locret_kernels.ragged_decode import Float8Rows, PackedRows

from ..decoding import VarlenRows
from .rows import BoundedLayer, EqualLengthHeads, Index, Layout


def each_row(first_P: Tensor, count_P: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Head and row ``[total]`` (int64) of the ``count`` rows from ``first`` on of every head, head after head. The host knows
    their ``total``, so it waits for nothing."""
    head_N = torch.arange(len(count_P), device=count_P.device).repeat_interleave(count_P, output_size=total)
    before_P = count_P.cumsum(0) - count_P  # [P]: rows of the heads before
    return head_N, torch.arange(total, device=count_P.device) + (first_P - before_P)[head_N]


class RaggedLayer(BoundedLayer):
    """Rows of one layer whose heads hold different numbers of slots, ``rows`` on average.

    Every buffer is flat: ``B * H * capacity`` rows, in which each head has a stretch as long as its rows and its room for
    new ones. The room is the same for every head, so the stretches fill the buffer whatever the budgets are. The host reads
    how long they are once an eviction, since attention is a call for each head.
    """

    ragged = True
    takes_back = False
    starts: Tensor
    """First row ``[B * H]`` (int64) of each head."""
    lengths: Tensor
    """Rows ``[B * H]`` (int64) of each head."""

    def _shape(self, rows: int) -> tuple[int, ...]:
        return (self.B * self.H * rows,)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._lay_out(torch.zeros(self.B * self.H, dtype=torch.int64, device=self.device))

    def _lay_out(self, lengths: Tensor) -> None:
        """Give every head a stretch for its rows and its room. Here the host waits, and nowhere else."""
        held = lengths.tolist()  # the one synchronisation per eviction
        self.lengths, self.rows = lengths, sum(held[: self.H]) // self.H
        # Stretch of head p: its rows, then `room` free ones. Sum over heads: P * rows + P * room = P * capacity.
        room = self.capacity - self.rows
        self.starts = lengths.cumsum(0) - lengths + room * torch.arange(len(held), device=self.device)
        starts = accumulate((length + room for length in held[:-1]), initial=0)
        self._stretches = list(zip(starts, held, strict=True))

    def append(self, k: Tensor, v: Tensor, score_BHT: Tensor) -> None:
        T = k.shape[2]
        # First free row of each head [P, 1] + [T] -> rows [B, H, T] of the flat buffers
        new_BHT = ((self.starts + self.lengths)[:, None] + torch.arange(T, device=self.device)).view(self.B, self.H, T)
        self._write(new_BHT, k, v)
        self.scores[new_BHT] = score_BHT
        self.positions[new_BHT] = self._new_positions(T)
        self._begin(new_BHT)
        self.count(T)

    def _write(self, new: slice | Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[new], self.values[new] = k, v

    def count(self, T: int) -> None:
        super().count(T)
        self.lengths = self.lengths + T
        self._stretches = [(start, length + T) for start, length in self._stretches]

    def score_newest(self, score_BT: Tensor) -> None:
        T = score_BT.shape[1]
        # [P, T]: the newest rows of each head; every head of a text gets the same scores
        newest = (self.starts + self.lengths - T)[:, None] + torch.arange(T, device=self.device)
        self.scores[newest] = score_BT.repeat_interleave(self.H, 0)

    def buffer(self, name: str) -> Tensor:
        """All rows of a buffer, the free room after them included."""
        return getattr(self, name)

    def parts(self) -> Iterator[EqualLengthHeads]:
        keys, values = self.buffer("keys"), self.buffer("values")
        for h, (start, length) in enumerate(self._stretches):
            # A stretch is contiguous, so a head is read in place: [1, 1, length, D].
            rows = slice(start, start + length)
            yield EqualLengthHeads(
                slice(h, h + 1), keys[None, None, rows], values[None, None, rows],
                self.stats[:, None, None, rows], self.positions[None, None, rows],
            )  # fmt: skip

    @property
    def reads_flat(self) -> bool:
        return True

    def flat(self) -> VarlenRows:
        starts, lengths = (x.view(self.B, self.H) for x in (self.starts, self.lengths))
        return VarlenRows(self._flat_rows(), self.positions, self.stats, starts, lengths, self.longest)

    def _flat_rows(self) -> tuple[Tensor, Tensor] | Float8Rows | PackedRows:
        return self.keys, self.values

    def head(self, name: str, h: int) -> Tensor:
        start, length = self._stretches[h]
        return self.buffer(name)[start : start + length]

    @property
    def head_lengths(self) -> list[int]:
        return [length for _, length in self._stretches]

    @property
    def longest(self) -> int:
        """Rows of the longest head."""
        return max(self.head_lengths)

    def _row_of_slot(self) -> Tensor:
        """Row ``[B * H, S]`` of each slot, aligned to the right; below the head's first row at padding."""
        # Slot s of a head is its row s - (S - length), so that the newest are aligned.
        S = self.longest
        return (self.starts + self.lengths - S)[:, None] + torch.arange(S, device=self.device)

    def valid(self) -> Tensor:
        S = self.longest
        slot_S = torch.arange(S, device=self.device)
        return (slot_S >= S - self.lengths[:, None]).view(self.B, self.H, S)

    def slots(self, name: str) -> Tensor:
        # Gathers [P, S] rows; those before a head's first (padding, on the left) are some other row's and then zeroed.
        index = self._row_of_slot().clamp(min=0)
        buffer, valid = self.buffer(name), self.valid()
        if name == "stats":
            return buffer[:, index].view(-1, *valid.shape).masked_fill(~valid, 0)
        out = buffer[index].view(*valid.shape, *buffer.shape[1:])
        return out.masked_fill(~(valid if out.dim() == 3 else valid[..., None]), 0)

    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        """Tables ``[B, H, size, R]``, aligned to the right; zero at padding."""
        # Per head [2, rows, R] -> the last `size`, padded on the left -> [2, P, size, R]
        made = [torch.stack(tables(length))[:, -size:] for _, length in self._stretches]
        padded = torch.stack([F.pad(x, (0, 0, size - x.shape[1], 0)) for x in made], dim=1)
        cos, sin = padded.view(2, self.B, self.H, size, -1)
        return cos, sin

    def _rows(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Every row ``[B * H * rows]``, head after head, and its place ``(head, slot)`` in ``slots``."""
        head_N, row_N = each_row(self.starts, self.lengths, self.B * self.H * self.rows)
        return row_N, (head_N, row_N - (self.starts + self.lengths - self.longest)[head_N])

    def set_entry_scores(self, score_BHS: Tensor) -> None:
        row_N, slot_N = self._rows()
        self.scores[row_N] = score_BHS.flatten(0, 1)[slot_N]

    def kept(self) -> list[list[Tensor]]:
        """Positions ``[rows of the head]`` held now, ``kept()[b][h]``."""
        rows = [self.positions[start : start + length].clone() for start, length in self._stretches]
        return [rows[b * self.H : (b + 1) * self.H] for b in range(self.B)]

    def keep(self, stay_BHS: Tensor, mean: int) -> None:
        # slots [P, S] -> rows [N], head after head; kept_rows takes the N that stay in order
        stay_PS, (row_N, slot_N) = stay_BHS.flatten(0, 1), self._rows()
        self._move(row_N[kept_rows(stay_PS[slot_N], self.B * self.H * mean)], stay_PS.sum(-1))
        self.since_eviction = 0

    def _move(self, source: Tensor, lengths: Tensor) -> None:
        """Lay the rows ``source`` out anew, head after head."""
        self._lay_out(lengths)
        _, target = each_row(self.starts, lengths, len(source))
        # buffer[source] is a copy, so targets may overlap sources.
        for buffer in self._moving():
            buffer[target] = buffer[source]

    def export(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        counts, tensors = super().export()
        return counts, tensors | ({"lengths": self.lengths} if tensors else {})

    def layout(self, counts: Mapping[str, float], lengths: Sequence[int], query_heads: int) -> Layout:
        return super().layout(counts, lengths, query_heads) | {"lengths": (torch.int64, (self.B * self.H,))}

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        self._lay_out(tensors["lengths"].to(self.device, copy=True))
        super()._fill(tensors)

    def _all_rows(self) -> Index:
        return self._rows()[0]

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self._lay_out(torch.zeros_like(self.lengths))
