"""The layout whose heads have different numbers of rows. Letters are those of ``layouts``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.compact import kept_rows

from .layouts import Index, Layout, Shapes


def each_row(first_P: Tensor, count_P: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Head and row ``[total]`` (int64) of the ``count`` rows from ``first`` on of every head, head after head. The host knows
    their ``total``, so it waits for nothing."""
    head_N = torch.arange(len(count_P), device=count_P.device).repeat_interleave(count_P, output_size=total)
    before_P = count_P.cumsum(0) - count_P  # [P]: rows of the heads before
    return head_N, torch.arange(total, device=count_P.device) + (first_P - before_P)[head_N]


class RaggedRows(Layout):
    """Heads with different numbers of rows, as adaptive allocations ask for.

    Every buffer is flat: ``B * H * capacity`` rows, in which each head has a stretch as long as its rows and its room for
    new ones. The room is the same for every head, so the stretches fill the buffer whatever the budgets are. The host reads
    how long they are once an eviction, since attention is a call for each head.
    """

    ragged = True
    starts: Tensor
    """First row ``[B * H]`` (int64) of each head."""
    lengths: Tensor
    """Rows ``[B * H]`` (int64) of each head."""
    stretches: list[tuple[int, int]]
    """First row and number of rows of each head, as the host knows them."""

    def begin(self) -> None:
        self._lay_out(torch.zeros(self.B * self.H, dtype=torch.int64, device=self.device))

    def _lay_out(self, lengths: Tensor) -> None:
        """Give every head a stretch for its rows and its room. Here the host waits, and nowhere else."""
        held = lengths.tolist()  # the one synchronisation per eviction
        self.lengths, self.rows = lengths, sum(held[: self.H]) // self.H
        # Stretch of head p: its rows, then `room` free ones. Sum over heads: P * rows + P * room = P * capacity.
        room = self.capacity - self.rows
        self.starts = lengths.cumsum(0) - lengths + room * torch.arange(len(held), device=self.device)
        starts = accumulate((length + room for length in held[:-1]), initial=0)
        self.stretches = list(zip(starts, held, strict=True))

    def clear(self) -> None:
        super().clear()
        if hasattr(self, "lengths"):
            self._lay_out(torch.zeros_like(self.lengths))

    def count(self, T: int) -> None:
        super().count(T)
        self.lengths = self.lengths + T
        self.stretches = [(start, length + T) for start, length in self.stretches]

    def shape(self, rows: int) -> tuple[int, ...]:
        return (self.B * self.H * rows,)

    def tensors(self) -> Shapes:
        return dict.fromkeys(("starts", "lengths"), (torch.int64, (self.B * self.H,)))

    def following(self, T: int) -> Index:
        return (self._from(self.starts + self.lengths, T),)

    def last(self, T: int) -> Index:
        return (self._from(self.starts + self.lengths - T, T),)

    def _from(self, first_P: Tensor, T: int) -> Tensor:
        """Rows ``[B, H, T]`` from one of each head on."""
        return (first_P[:, None] + torch.arange(T, device=self.device)).view(self.B, self.H, T)

    def every(self) -> Index:
        return (self._rows()[0],)

    def head(self, h: int) -> Index:
        start, length = self.stretches[h]
        return (slice(start, start + length),)

    def pieces(self) -> list[tuple[slice, Index]]:
        # A stretch is contiguous, so a head is read in place: [1, 1, length].
        return [
            (slice(h, h + 1), (None, None, slice(start, start + length)))
            for h, (start, length) in enumerate(self.stretches)
        ]

    def slots(self) -> tuple[Index, Tensor | None]:
        # Slot s of a head is its row s - (S - length), so that the newest are aligned; padding reads some other row.
        S = self.longest
        return (self._from(self.starts + self.lengths - S, S).clamp(min=0),), ~self.valid()

    def valid(self) -> Tensor:
        S = self.longest
        slot_S = torch.arange(S, device=self.device)
        return (slot_S >= S - self.lengths[:, None]).view(self.B, self.H, S)

    def _rows(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Every row ``[B * H * rows]``, head after head, and its place ``(head, slot)`` among the slots."""
        head_N, row_N = each_row(self.starts, self.lengths, self.B * self.H * self.rows)
        return row_N, (head_N, row_N - (self.starts + self.lengths - self.longest)[head_N])

    def put_back(self, buffer: Tensor, slots_BHS: Tensor) -> None:
        row_N, slot_N = self._rows()
        buffer[row_N] = slots_BHS.flatten(0, 1)[slot_N]

    @property
    def longest(self) -> int:
        return max(self.head_lengths)

    @property
    def head_lengths(self) -> list[int]:
        return [length for _, length in self.stretches]

    def spans(self) -> tuple[Tensor, Tensor]:
        return self.starts.view(self.B, self.H), self.lengths.view(self.B, self.H)

    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        # Per head [2, rows, R] -> the last `size`, padded on the left -> [2, P, size, R]
        made = [torch.stack(tables(length))[:, -size:] for length in self.head_lengths]
        padded = torch.stack([F.pad(x, (0, 0, size - x.shape[1], 0)) for x in made], dim=1)
        cos, sin = padded.view(2, self.B, self.H, size, -1)
        return cos, sin

    def kept(self, positions: Tensor) -> list[list[Tensor]]:
        """Positions ``[rows of the head]``, ``kept()[b][h]``."""
        rows = [positions[start : start + length].clone() for start, length in self.stretches]
        return [rows[b * self.H : (b + 1) * self.H] for b in range(self.B)]

    def keep(self, stay_BHS: Tensor, mean: int, buffers: Sequence[Tensor], backend: str) -> None:
        # slots [P, S] -> rows [N], head after head; kept_rows takes the N that stay in order
        stay_PS, (row_N, slot_N) = stay_BHS.flatten(0, 1), self._rows()
        source = row_N[kept_rows(stay_PS[slot_N], self.B * self.H * mean)]
        self._lay_out(stay_PS.sum(-1))
        _, target = each_row(self.starts, self.lengths, len(source))
        # buffer[source] is a copy, so targets may overlap sources.
        for buffer in buffers:
            buffer[target] = buffer[source]

    def export(self) -> dict[str, Tensor]:
        return {"lengths": self.lengths}

    def exported(self) -> Shapes:
        return {"lengths": (torch.int64, (self.B * self.H,))}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self._lay_out(tensors["lengths"].to(self.device, copy=True))
