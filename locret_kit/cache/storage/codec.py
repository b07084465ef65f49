"""Codecs: how keys and values of a layer's rows are stored. ``Plain`` stores them as they come; see ``float8``, ``quantised``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from locret_kernels.ragged_decode import Float8Rows, PackedRows

from .layouts import Index, Layout, Shapes

Column = tuple[torch.dtype, tuple[int, ...]]
"""Dtype of a buffer that has a row per slot, and the shape of one row."""


class Codec(ABC):
    """Keys and values of one layer, in buffers that lie as a layout says."""

    COUNTS: ClassVar[tuple[str, ...]] = ()
    """Counts of its own that an export has."""
    takes_back: ClassVar[bool] = True
    """Whether rows are held as they came, so that the newest ones can be forgotten."""
    packed: ClassVar[bool] = False
    """Whether one token's attention always reads the rows as they are stored, unless they are open."""
    layout: Layout
    key_size: int
    value_size: int
    dtype: torch.dtype
    """Of keys and values as they come and are read."""

    def measure(self, layout: Layout, key_size: int, value_size: int, dtype: torch.dtype) -> None:
        """Take the layout, sizes and dtype. Allocates nothing. Raises ValueError for a size that does not fit."""
        self.layout, self.key_size, self.value_size, self.dtype = layout, key_size, value_size, dtype

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Buffers with a row per slot, which move with the rows."""

    def tables(self) -> Shapes:
        """Buffers beside them, whatever the rows are."""
        return {}

    def begin(self) -> None:
        """Set what buffers must hold before the first row."""

    @property
    def open(self) -> bool:
        """Whether rows are read into a scratch, so that those that are stored are not the latest."""
        return False

    # ---- rows ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def write(self, at: Index, k_BHTD: Tensor, v_BHTD: Tensor) -> None:
        """Write the new rows ``at``, which are not yet counted."""

    @abstractmethod
    def read(self, name: str, at: Index) -> Tensor:
        """``keys`` or ``values`` of rows, in the model's dtype: a view where that is possible."""

    @abstractmethod
    def flat(self) -> tuple[Tensor, Tensor] | Float8Rows | PackedRows:
        """All rows as they are stored, end to end."""

    def moving(self) -> list[Tensor]:
        """Every buffer whose rows an eviction moves."""
        return [getattr(self, name) for name in self.columns()]

    def read_all(self) -> None:
        """Read all rows where they must be at hand before they move."""

    def finish_block(self) -> None:
        """Bring new rows into the form in which they are kept, after their block's attention and eviction."""

    def grow(self) -> None:
        """Take a larger capacity, to which the columns have grown."""

    def clear(self) -> None:
        """Forget all rows."""

    # ---- taken out and put back ------------------------------------------------------------------------------------

    def room(self, tensors: Mapping[str, Tensor]) -> int:
        """Rows of a head for which there must be room, so that exported tensors fit, whatever their rows. Needs ``measure``."""
        return 0

    def export(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors beside the columns' ``rows``, and those of them in which a codec has blanked what means nothing."""
        return {}

    def exported(self) -> Shapes:
        """Dtype and shape of every tensor that ``export`` gives beside the columns. Needs the counts."""
        return self.tables()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what ``export`` gave."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for exported numbers by which something would be read out of bounds. Needs the counts."""


class Plain(Codec):
    """Keys and values in the model's dtype."""

    keys: Tensor
    values: Tensor

    def columns(self) -> dict[str, Column]:
        return {"keys": (self.dtype, (self.key_size,)), "values": (self.dtype, (self.value_size,))}

    def write(self, at: Index, k_BHTD: Tensor, v_BHTD: Tensor) -> None:
        self.keys[at], self.values[at] = k_BHTD, v_BHTD

    def read(self, name: str, at: Index) -> Tensor:
        rows: Tensor = getattr(self, name)[at]
        return rows

    def flat(self) -> tuple[Tensor, Tensor]:
        # [B, H, capacity, D], or [N, D] of ragged heads: end to end either way.
        return self.keys.flatten(0, -2), self.values.flatten(0, -2)
