"""Codecs: how keys and values of a layer's rows are stored. ``Plain`` stores them as they come; see ``quantised``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from locret_kernels.ragged_decode import ByteRows, PackedRows

from ...policies import Policy
from ...policies.capabilities import Subject, refuse
from ...registry import Registry
from .layouts import Index, Layout, Shapes

BITS = (4, 2)
"""Bits of codes whose keys are in groups of rows (``quantised.GroupedBits``)."""


def check_storage(kv_bits: int | str | None, policy: Policy) -> None:
    """Raise ValueError unless there is such a codec (8, 4, 2, or a plugin's name), and it can store the slots that ``policy``
    keeps: a slot that was quantised is not written again."""
    if kv_bits is not None:
        _ = CODECS[str(kv_bits)]
    refuse("few bits", Subject(policy, kv_bits=kv_bits))


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
    """Type of keys and values when they come and are read."""

    def measure(self, layout: Layout, key_size: int, value_size: int, dtype: torch.dtype) -> None:
        """Take the layout, sizes and dtype. Allocates nothing. Raises ValueError for a size that does not fit."""
        self.layout, self.key_size, self.value_size, self.dtype = layout, key_size, value_size, dtype

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Buffers with a row per slot, which move with the rows."""

    def tables(self) -> Shapes:
        """Further buffers, without a row per slot."""
        return {}

    @property
    def open(self) -> bool:
        """Whether rows are read into a scratch, so that those that are stored are not the latest."""
        return False

    @abstractmethod
    def write(self, at: Index, k_HTD: Tensor, v_HTD: Tensor) -> None:
        """Write the new rows ``at``, which are not yet counted."""

    @abstractmethod
    def read(self, name: str, at: Index) -> Tensor:
        """``keys`` or ``values`` of rows, of the index's shape, in the model's dtype: a view where that is possible."""

    @abstractmethod
    def flat(self) -> tuple[Tensor, Tensor] | ByteRows | PackedRows:
        """All rows ``[N, D]`` as they are stored, end to end."""

    def moving(self) -> list[Tensor]:
        """Every buffer ``[H, capacity, D]``, or flat ``[N, D]``, whose rows an eviction moves."""
        return [getattr(self, name) for name in self.columns()]

    def read_all(self) -> None:
        """Read all rows where they must be at hand before they move."""

    def count(self) -> None:
        """Count a token that a compiled call has written."""

    def finish_block(self) -> None:
        """Bring new rows into their stored form, after their block's attention and eviction."""

    def grow(self) -> None:
        """Take over a larger capacity after the columns have grown."""

    def clear(self) -> None:
        """Forget all rows."""

    def room(self, tensors: Mapping[str, Tensor]) -> int:
        """Rows per head that exported tensors of any shape need room for. Needs ``measure``."""
        return 0

    def export(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Exported tensors besides the columns' ``rows``, and columns with meaningless numbers blanked; each keeps
        its shape."""
        return {}

    def exported(self) -> Shapes:
        """Dtype and shape of every tensor that ``export`` gives besides the columns. Needs the counts."""
        return self.tables()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back exported tensors of their exported shape."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for exported numbers, of any shape, that would be read out of bounds. Needs the counts."""


class Scratch:
    """Keys and values ``[H, rows, D]`` in the model's dtype of the one layer that is read now; all layers share it."""

    def __init__(self) -> None:
        self.owner: Codec | None = None
        self.complete = True
        """Whether it holds all values, and not the tail's alone."""
        self.keys = self.values = torch.empty(0, 0, 0, dtype=torch.float32, device="cpu")

    def acquire(self, codec: Codec) -> None:
        """Give the buffers to a layer, made anew where they do not fit it."""
        rows = codec.layout
        for name, size in (("keys", codec.key_size), ("values", codec.value_size)):
            old, like = getattr(self, name), (rows.H, size, codec.dtype, rows.device)
            # Rows to spare do no harm: layers of several capacities share the largest buffer.
            if old.shape[1] < rows.capacity or (len(old), old.shape[2], old.dtype, old.device) != like:
                with torch.inference_mode(False):
                    new = torch.empty(rows.H, rows.capacity, size, dtype=codec.dtype, device=rows.device)
                setattr(self, name, new)
        self.owner = codec

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return int(self.keys.nbytes + self.values.nbytes)


CODECS: Registry[Callable[[int | str, Scratch, bool, bool], Codec]] = Registry("kv_bits")
"""Makers of a layer's codec, by the values of ``kv_bits``: called with that value, the scratch of all layers, whether compiled
calls read and write rows, and whether nothing is evicted."""


class Plain(Codec):
    """Keys and values in the model's dtype."""

    keys: Tensor
    values: Tensor

    def columns(self) -> dict[str, Column]:
        return {"keys": (self.dtype, (self.key_size,)), "values": (self.dtype, (self.value_size,))}

    def write(self, at: Index, k_HTD: Tensor, v_HTD: Tensor) -> None:
        self.keys[at], self.values[at] = k_HTD, v_HTD

    def read(self, name: str, at: Index) -> Tensor:
        """``keys`` or ``values`` of rows, of the index's shape, as they are stored."""
        return getattr(self, name)[at]

    def flat(self) -> tuple[Tensor, Tensor]:
        """All keys and all values ``[N, D]``, end to end."""
        # [H, capacity, D], or [N, D] of ragged heads: end to end either way.
        return self.keys.flatten(0, -2), self.values.flatten(0, -2)
