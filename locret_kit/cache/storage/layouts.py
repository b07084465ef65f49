"""Layouts of a layer's rows: where each head's rows lie in a buffer with room for ``capacity`` rows a head.

The rows are those of one text: buffers have no batch axis. An index for attention or a policy adds one, of size 1.
A letter besides the legend's: N, rows of all heads, end to end.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.backend import function
from locret_kernels.rows import Addresses, kept_rows

from ...registry import Registry

Index = tuple[slice | Tensor | int | None, ...]
"""Index of rows in a buffer."""
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""
ALL = slice(None)


@cache
def _true(device: torch.device) -> Tensor:
    """True, of shape [], once for all layers of a device."""
    return torch.ones((), dtype=torch.bool, device=device)


class Layout:
    """Rows of every head, ordered by age: ``rows`` of them, on average where heads differ. Here all have as many: buffers are
    ``[H, capacity, ...]``, each head's rows at the front. Another layout overrides what says otherwise."""

    ragged = False
    """Whether heads may differ in their number of rows."""
    H: int
    device: torch.device

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, 0
        self.addresses: Addresses = {}
        """See ``compact_rows``."""

    def measure(self, H: int, device: torch.device) -> None:
        """Take heads and device. Allocates nothing."""
        self.H, self.device = H, device

    def begin(self) -> None:
        """Make what tells where rows are; ``rows`` may be known already."""

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = 0

    def count(self, T: int) -> None:
        """Count ``T`` rows more in every head."""
        self.rows += T

    def shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a buffer with one number per row, for ``rows`` rows per head."""
        return self.H, rows

    def tensors(self) -> Shapes:
        """Dtype and shape of the tensors that tell where rows are."""
        return {}

    def following(self, T: int) -> Index:
        """Index ``[H, T]`` of the free rows after the newest."""
        return ALL, slice(self.rows, self.rows + T)

    def last(self, T: int) -> Index:
        """Index ``[H, T]`` of the newest ``T`` rows of every head."""
        return ALL, slice(self.rows - T, self.rows)

    def every(self) -> Index:
        """Index of all rows, head after head."""
        return self.last(self.rows)

    def head(self, h: int) -> Index:
        """Index ``[rows]`` of a head's rows."""
        return h, slice(0, self.rows)

    def pieces(self) -> list[tuple[slice, Index]]:
        """Heads of equal length, and the index ``[1, h, S]`` of their rows: as few pieces as lie in one stretch each."""
        return [(slice(0, self.H), self.slots()[0])]

    def slots(self) -> tuple[Index, Tensor | None]:
        """Index ``[1, H, S]`` of the rows of all heads, aligned to the right, and the mask ``[1, H, S]`` of padding, if any."""
        return (None, *self.every()), None

    def valid(self) -> Tensor:
        """Boolean ``[1, H, S]``: which slots are no padding."""
        return _true(self.device).expand(1, self.H, self.rows)

    def put_back(self, buffer: Tensor, slots_1HS: Tensor) -> None:
        """Write slots ``[1, H, S]`` of a buffer back to its rows, where reading has copied them."""

    @property
    def longest(self) -> int:
        """Rows of the longest head."""
        return self.rows

    @property
    def head_lengths(self) -> list[int] | None:
        """Rows of every head, where heads differ."""
        return None

    def spans(self) -> tuple[Tensor, Tensor]:
        """First row and number of rows ``[1, H]`` of every head, in buffers whose rows lie end to end."""
        # All heads end to end [H * capacity]: head h begins at its multiple of the capacity.
        starts = self.capacity * torch.arange(self.H, device=self.device)[None]
        return starts, torch.full_like(starts, self.rows)

    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        """Two tables ``[1, H, size, R]`` (1 head where all are alike), aligned to the right, with zeros at padding.
        ``tables(rows)`` makes them for a head of ``rows`` rows."""
        cos, sin = tables(self.rows)
        return cos[None, None], sin[None, None]

    def kept(self, positions: Tensor) -> Tensor | list[list[Tensor]]:
        """A copy of the rows' positions ``[1, H, S]``, or a list ``[0][h]`` of positions where heads differ."""
        return positions[self.slots()[0]].clone()

    def keep(self, chosen: Tensor, mean: int, buffers: Sequence[Sequence[Tensor]], backend: str) -> None:
        """Move the rows that stay to the front, ``mean`` of a head; the rest is free.

        Args:
            chosen: slots ``[layers, H, S]`` that stay (bool), or where heads are of one length their index ``[layers, H, mean]``.
            buffers: tensors of each layer that is stored like this, this one first.
        """
        # In place: row i moves to a row that is not above it, so order by age is kept.
        index_LHK = kept_rows(chosen, mean) if chosen.dtype == torch.bool else chosen
        function("compact_rows", backend)(buffers, index_LHK, self.addresses)

    def export(self) -> dict[str, Tensor]:
        """Tensors that tell where rows are, such as lengths ``[H]``."""
        return {}

    def exported(self) -> Shapes:
        """Dtype and shape of every tensor that ``export`` gives."""
        return {}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back exported tensors, such as lengths ``[H]``."""


def each_row(first_H: Tensor, count_H: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Head and row ``[total]`` (int64) of the ``count`` rows from ``first`` on of every head, head after head. The host knows
    their ``total``, so it waits for nothing."""
    head_N = torch.arange(len(count_H), device=count_H.device).repeat_interleave(count_H, output_size=total)
    before_H = count_H.cumsum(0) - count_H  # [H]: rows of the heads before
    return head_N, torch.arange(total, device=count_H.device) + (first_H - before_H)[head_N]


class RaggedRows(Layout):
    """Heads with different numbers of rows, for adaptive allocations.

    Every buffer is flat: ``H * capacity`` rows, with a stretch per head, as long as its rows and its room for
    new ones. The room is the same for every head, so the stretches fill the buffer whatever the budgets are. The host
    reads their lengths once per eviction, since attention is a call for each head.
    """

    ragged = True
    starts: Tensor
    """First row ``[H]`` (int64) of each head."""
    lengths: Tensor
    """Rows ``[H]`` (int64) of each head."""
    stretches: list[tuple[int, int]]
    """First row and number of rows of each head, as the host knows them."""

    def begin(self) -> None:
        self._lay_out(torch.zeros(self.H, dtype=torch.int64, device=self.device))

    def _lay_out(self, lengths: Tensor) -> None:
        """Give every head a stretch for its rows, ``lengths [H]``, and its room. The host waits here and nowhere
        else."""
        held = lengths.tolist()  # the one synchronisation per eviction
        self.lengths, self.rows = lengths, sum(held) // self.H
        # Stretch of a head: its rows, then `room` free ones. Sum over heads: H * rows + H * room = H * capacity.
        room = self.capacity - self.rows
        self.starts = lengths.cumsum(0) - lengths + room * torch.arange(self.H, device=self.device)
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
        return (self.H * rows,)

    def tensors(self) -> Shapes:
        return dict.fromkeys(("starts", "lengths"), (torch.int64, (self.H,)))

    def following(self, T: int) -> Index:
        return (self._from(self.starts + self.lengths, T),)

    def last(self, T: int) -> Index:
        return (self._from(self.starts + self.lengths - T, T),)

    def _from(self, first_H: Tensor, T: int) -> Tensor:
        """Rows ``[H, T]`` from one of each head on."""
        return first_H[:, None] + torch.arange(T, device=self.device)

    def every(self) -> Index:
        return (self._rows()[0],)

    def head(self, h: int) -> Index:
        start, length = self.stretches[h]
        return (slice(start, start + length),)

    def pieces(self) -> list[tuple[slice, Index]]:
        # A stretch is contiguous, so a head is read in place: [1, 1, length].
        return [(slice(h, h + 1), (None, None, *self.head(h))) for h in range(self.H)]

    def slots(self) -> tuple[Index, Tensor | None]:
        """Index ``[1, H, S]`` of rows, aligned to the right, and the mask ``[1, H, S]`` of padding."""
        # Slot s of a head is its row s - (S - length), so that the newest are aligned; padding reads some other row.
        S = self.longest
        return (self._from(self.starts + self.lengths - S, S)[None].clamp(min=0),), ~self.valid()

    def valid(self) -> Tensor:
        """Boolean ``[1, H, S]``: which slots are no padding."""
        S = self.longest
        slot_S = torch.arange(S, device=self.device)
        return (slot_S >= S - self.lengths[:, None])[None]

    def _rows(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Every row ``[H * rows]``, head after head, and its place ``(head, slot)`` among the slots."""
        head_N, row_N = each_row(self.starts, self.lengths, self.H * self.rows)
        return row_N, (head_N, row_N - (self.starts + self.lengths - self.longest)[head_N])

    def put_back(self, buffer: Tensor, slots_1HS: Tensor) -> None:
        """Write slots ``[1, H, S]`` back to the flat rows ``[N]`` of a buffer."""
        row_N, slot_N = self._rows()
        buffer[row_N] = slots_1HS[0][slot_N]

    @property
    def longest(self) -> int:
        return max(self.head_lengths)

    @property
    def head_lengths(self) -> list[int]:
        return [length for _, length in self.stretches]

    def spans(self) -> tuple[Tensor, Tensor]:
        """First row and number of rows ``[1, H]`` of every head."""
        return self.starts[None], self.lengths[None]

    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        """Two tables ``[1, H, size, R]``, aligned to the right, with zeros at padding."""
        # Per head [2, rows, R] -> the last `size`, padded on the left -> [2, H, size, R]
        made = [torch.stack(tables(length))[:, -size:] for length in self.head_lengths]
        cos, sin = torch.stack([F.pad(x, (0, 0, size - x.shape[1], 0)) for x in made], dim=1)
        return cos[None], sin[None]

    def kept(self, positions: Tensor) -> list[list[Tensor]]:
        """Positions of each head, of shape ``[rows]``, as ``kept()[0][h]``."""
        return [[positions[self.head(h)].clone() for h in range(self.H)]]

    def keep(self, chosen: Tensor, mean: int, buffers: Sequence[Sequence[Tensor]], backend: str) -> None:
        """Move the chosen rows to the front of new stretches; see ``Layout.keep``. ``chosen``: slots ``[1, H, S]``
        (bool)."""
        # slots [H, S] -> rows [N], head after head; kept_rows takes the N that stay in order
        (stay_HS,), (row_N, slot_N) = chosen, self._rows()
        source = row_N[kept_rows(stay_HS[slot_N], self.H * mean)]
        self._lay_out(stay_HS.sum(-1))
        _, target = each_row(self.starts, self.lengths, len(source))
        # buffer[source] is a copy, so targets may overlap sources.
        for buffer in buffers[0]:
            buffer[target] = buffer[source]

    def export(self) -> dict[str, Tensor]:
        """Lengths ``[H]`` of all heads."""
        return {"lengths": self.lengths}

    def exported(self) -> Shapes:
        return {"lengths": (torch.int64, (self.H,))}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Lay out anew by the exported lengths ``[H]``."""
        self._lay_out(tensors["lengths"].to(self.device, copy=True))


LAYOUTS: Registry[type[Layout]] = Registry("layout")
"""Layouts by the names that allocations have for them."""
LAYOUTS.register("equal")(Layout)
LAYOUTS.register("ragged")(RaggedRows)
