"""Layouts of a layer's rows: where each head's rows lie in a buffer with room for ``capacity`` rows a head.

Letters beside the legend's: P = B * H, the heads of the whole batch, item after item; N, rows of all of them, end to end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from locret_kernels.backend import function

Index = tuple[slice | Tensor | int | None, ...]
"""Index of rows in a buffer."""
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""
ALL = slice(None)


class Layout(ABC):
    """Rows of every head, ordered by age: ``rows`` of them, on average where heads differ."""

    ragged: bool
    """Whether heads may differ in their number of rows."""
    B: int
    H: int
    device: torch.device

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, 0

    def measure(self, B: int, H: int, device: torch.device) -> None:
        """Take batch, heads and device. Allocates nothing."""
        self.B, self.H, self.device = B, H, device

    def begin(self) -> None:
        """Make what tells where rows are; ``rows`` may be known already."""

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = 0

    def count(self, T: int) -> None:
        """Count ``T`` rows more in every head."""
        self.rows += T

    @abstractmethod
    def shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a buffer with one number per row, for so many rows per head."""

    def tensors(self) -> Shapes:
        """Dtype and shape of the tensors that tell where rows are."""
        return {}

    # ---- which rows ------------------------------------------------------------------------------------------------

    @abstractmethod
    def following(self, T: int) -> Index:
        """Index ``[B, H, T]`` of the free rows after the newest."""

    @abstractmethod
    def last(self, T: int) -> Index:
        """Index ``[B, H, T]`` of the newest rows, of which every head has ``T``."""

    @abstractmethod
    def every(self) -> Index:
        """Index of all rows, head after head."""

    @abstractmethod
    def head(self, h: int) -> Index:
        """Index ``[rows]`` of a head's rows."""

    @abstractmethod
    def pieces(self) -> list[tuple[slice, Index]]:
        """Heads of equal length, and the index ``[b, h, S]`` of their rows: as few pieces as lie in one stretch each."""

    @abstractmethod
    def slots(self) -> tuple[Index, Tensor | None]:
        """Index ``[B, H, S]`` of the rows of all heads, aligned to the right, and which of them are padding."""

    @abstractmethod
    def valid(self) -> Tensor:
        """Boolean ``[B, H, S]``: which slots are no padding."""

    @abstractmethod
    def put_back(self, buffer: Tensor, slots_BHS: Tensor) -> None:
        """Write what was read from the slots of a buffer back to its rows, where reading has copied it."""

    # ---- how many --------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def longest(self) -> int:
        """Rows of the longest head."""

    @property
    @abstractmethod
    def head_lengths(self) -> list[int] | None:
        """Rows of every head, where heads differ."""

    @abstractmethod
    def spans(self) -> tuple[Tensor, Tensor]:
        """First row and number of rows ``[B, H]`` of every head, in buffers whose rows lie end to end."""

    @abstractmethod
    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        """Two tables ``[B, H, size, R]`` (1 where all are alike) that ``tables(rows)`` gives for a head of so many rows,
        aligned to the right; zero at padding."""

    @abstractmethod
    def kept(self, positions: Tensor) -> Tensor | list[list[Tensor]]:
        """A copy of the positions that the rows have."""

    # ---- moving ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def keep(self, stay_BHS: Tensor, mean: int, buffers: Sequence[Tensor], backend: str) -> None:
        """Keep the slots that stay, ``mean`` of them a head, and move their rows to the front; the rest is free."""

    # ---- taken out and put back ------------------------------------------------------------------------------------

    def export(self) -> dict[str, Tensor]:
        """Tensors that tell where rows are."""
        return {}

    def exported(self) -> Shapes:
        """Dtype and shape of every tensor that ``export`` gives."""
        return {}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take exported tensors back."""


class EqualRows(Layout):
    """As many rows in every head: buffers ``[B, H, capacity, ...]``, each head's rows at the front."""

    ragged = False

    def shape(self, rows: int) -> tuple[int, ...]:
        return self.B, self.H, rows

    def at(self, rows: Tensor) -> Index:
        """Index of such rows of every head, which may be known to the device alone."""
        return ALL, ALL, rows

    def following(self, T: int) -> Index:
        return ALL, ALL, slice(self.rows, self.rows + T)

    def last(self, T: int, newer: int = 0) -> Index:
        """As ``Layout.last``, but for the newest ``newer``."""
        return ALL, ALL, slice(self.rows - T, self.rows - newer)

    def every(self) -> Index:
        return self.last(self.rows)

    def head(self, h: int) -> Index:
        return 0, h, slice(0, self.rows)

    def pieces(self) -> list[tuple[slice, Index]]:
        return [(slice(0, self.H), (ALL, ALL, slice(0, self.rows)))]

    def slots(self) -> tuple[Index, Tensor | None]:
        return (ALL, ALL, slice(0, self.rows)), None

    def valid(self) -> Tensor:
        return torch.ones(self.B, self.H, self.rows, dtype=torch.bool, device=self.device)

    def put_back(self, buffer: Tensor, slots_BHS: Tensor) -> None:
        pass  # the slots are the buffer itself

    @property
    def longest(self) -> int:
        return self.rows

    @property
    def head_lengths(self) -> None:
        return None

    def spans(self) -> tuple[Tensor, Tensor]:
        # All heads end to end [B * H * capacity]: head (b, h) begins at its multiple of the capacity.
        starts = self.capacity * torch.arange(self.B * self.H, device=self.device).view(self.B, self.H)
        return starts, torch.full_like(starts, self.rows)

    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        cos, sin = tables(self.rows)
        return cos[None, None], sin[None, None]

    def kept(self, positions: Tensor) -> Tensor:
        """Positions ``[B, H, rows]``."""
        return positions[:, :, : self.rows].clone()

    def keep(self, stay_BHS: Tensor, mean: int, buffers: Sequence[Tensor], backend: str) -> None:
        # In place: row i moves to a row that is not above it, so order by age is kept.
        index_BHK = function("kept_rows", backend)(stay_BHS, mean)
        function("compact_rows", backend)(list(buffers), index_BHK)
        self.rows = mean
