"""Codecs: how keys and values of a layer's rows are stored. ``Plain`` stores them as they come; see ``Float8``, ``quantised``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from locret_kernels.enter import LARGEST, Scales, float8_codes
from locret_kernels.ragged_decode import Float8Rows, PackedRows

from ...policies import Policy
from ...policies.capabilities import Subject, refuse
from ...registry import Registry
from .layouts import Index, Layout, Shapes

# ---- bits of a stored number ----------------------------------------------------------------------------------------

# Which there are, and what goes with them.


BITS = (4, 2)
FLOAT8 = 8
"""Bits that are no codes of groups but floating point: see ``codec.Float8``."""


def check_storage(kv_bits: int | str | None, policy: Policy) -> None:
    """Raise ValueError unless there is such a codec (8, 4, 2, or a plugin's name), and it can store the slots that ``policy``
    keeps: a slot that was quantised is not written again."""
    if kv_bits is not None:
        _ = CODECS[str(kv_bits)]
    refuse("few bits", Subject(policy, kv_bits=kv_bits))


# ---- codecs ----


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

    def begin(self) -> None:
        """Set what buffers must hold before the first row."""

    @property
    def open(self) -> bool:
        """Whether rows are read into a scratch, so that those that are stored are not the latest."""
        return False

    # ---- rows ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def write(self, at: Index, k_HTD: Tensor, v_HTD: Tensor) -> None:
        """Write the new rows ``at``, which are not yet counted."""

    @abstractmethod
    def read(self, name: str, at: Index) -> Tensor:
        """``keys`` or ``values`` of rows, of the index's shape, in the model's dtype: a view where that is possible."""

    @abstractmethod
    def flat(self) -> tuple[Tensor, Tensor] | Float8Rows | PackedRows:
        """All rows ``[N, D]`` as they are stored, end to end."""

    def moving(self) -> list[Tensor]:
        """Every buffer ``[H, capacity, D]``, or flat ``[N, D]``, whose rows an eviction moves."""
        return [getattr(self, name) for name in self.columns()]

    def read_all(self) -> None:
        """Read all rows where they must be at hand before they move."""

    def finish_block(self) -> None:
        """Bring new rows into their stored form, after their block's attention and eviction."""

    def grow(self) -> None:
        """Take over a larger capacity after the columns have grown."""

    def clear(self) -> None:
        """Forget all rows."""

    # ---- taken out and put back ------------------------------------------------------------------------------------

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
        rows: Tensor = getattr(self, name)[at]
        return rows

    def flat(self) -> tuple[Tensor, Tensor]:
        """All keys and all values ``[N, D]``, end to end."""
        # [H, capacity, D], or [N, D] of ragged heads: end to end either way.
        return self.keys.flatten(0, -2), self.values.flatten(0, -2)


# ---- buffers into which rows in few bits are read -------------------------------------------------------------------

# One pair for all layers of a cache.


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


# ---- keys and values in floating point of 8 bits (E4M3) ----


# ---- keys and values of rows in floating point of 8 bits ------------------------------------------------------------

# E4M3: sign, 4 bits of exponent, 3 of mantissa; a scale for each head.
#
# A number is read back as ``code * scale``, within 1/16 of itself wherever it is above a 28,672nd of the largest, which is 448
# times the scale. A head's scale is a power of two, so scaling rounds nothing, and is fixed by the first tokens of a text that
# are read together: the largest number among them is ``MARGIN`` times below the largest code. A number beyond that is clipped,
# and counted.
#
# A row is quantised as it enters and never again, so it moves as it is. A decoded token's attention reads the codes as they lie;
# a chunk's reads all rows in the model's dtype, its own too as they are stored.


MARGIN = 4.0
"""Room for numbers above the largest of the first tokens; one bit of 17 in the range of a code."""


def scale_of(x_HTD: Tensor) -> Tensor:
    """Scale ``[H]`` (float32, a power of two) of heads with such numbers."""
    most_H = x_HTD.abs().amax((1, 2)).float().clamp(min=2.0**-100)
    exponent_H = torch.frexp(most_H * (MARGIN / LARGEST)).exponent
    return ((exponent_H + 127) << 23).view(torch.float32)  # 2 to that power, exactly


class Float8(Codec):
    """Keys and values in 8 bits."""

    keys: Tensor
    """Codes as uint8, which every operation can move, and so are the values'."""
    values: Tensor
    key_scale: Tensor
    """``[H]`` float32, and so is the values'."""
    value_scale: Tensor
    clipped: Tensor
    """``[2]`` int64: numbers of keys and of values that were beyond the largest code."""

    def columns(self) -> dict[str, Column]:
        return {"keys": (torch.uint8, (self.key_size,)), "values": (torch.uint8, (self.value_size,))}

    def tables(self) -> Shapes:
        scale = torch.float32, (self.layout.H,)
        return {"key_scale": scale, "value_scale": scale, "clipped": (torch.int64, (2,))}

    def begin(self) -> None:
        self.key_scale.fill_(1)
        self.value_scale.fill_(1)
        self.clipped.zero_()

    def write(self, at: Index, k_HTD: Tensor, v_HTD: Tensor) -> None:
        scales = self.scales(k_HTD, v_HTD)
        for number, (codes, scale_H, x) in enumerate(
            ((self.keys, scales.keys_H, k_HTD), (self.values, scales.values_H, v_HTD))
        ):
            codes[at], clipped = float8_codes(x, scale_H)
            self.clipped[number] += clipped

    def scales(self, k_HTD: Tensor, v_HTD: Tensor) -> Scales:
        """Scales for new rows, the first of which fix them for good: rows are never written a second time."""
        if not self.layout.rows:
            self.key_scale[:], self.value_scale[:] = scale_of(k_HTD), scale_of(v_HTD)
        return Scales(self.key_scale, self.value_scale, self.clipped)

    def read(self, name: str, at: Index) -> Tensor:
        """``keys`` or ``values`` of rows, of the index's shape: 8-bit floats times the head's scale."""
        codes, scale_H = (self.keys, self.key_scale) if name == "keys" else (self.values, self.value_scale)
        return codes[at].view(torch.float8_e4m3fn).to(self.dtype).mul_(scale_H[:, None, None].to(self.dtype))

    def flat(self) -> Float8Rows:
        keys, values = self.keys.flatten(0, -2), self.values.flatten(0, -2)
        return Float8Rows(keys, values, self.key_scale, self.value_scale)

    def clear(self) -> None:
        if hasattr(self, "clipped"):
            self.clipped.zero_()

    # ---- taken out and put back ------------------------------------------------------------------------------------

    def export(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scales ``[H]`` of keys and of values."""
        return {name: getattr(self, name) for name in self.tables()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the scales ``[H]`` of keys and of values."""
        for name in self.tables():
            getattr(self, name).copy_(tensors[name])


@CODECS.register(str(FLOAT8))
def float8(bits: int | str, scratch: Scratch, compiled: bool, grows: bool) -> Codec:
    """Codec of ``kv_bits=8``."""
    return Float8()
