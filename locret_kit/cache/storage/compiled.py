"""Keys and values in few bits that compiled calls (``locret_kernels.quantise``) read and quantise while a prompt is read on a
CPU: of one text, with as many rows for every head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from locret_kernels import cpp
from locret_kernels.hadamard import hadamard
from locret_kernels.quantise import cpu as quantiser

from .quantised import GroupedBits, pairs_of


def fits(codec: GroupedBits) -> bool:
    """Whether the calls take a layer: keys as wide as values."""
    alike = codec.key_size == codec.value_size
    device = codec.layout.device.type
    return alike and codec.group.dtype == torch.int16 and device == "cpu" and codec.dtype in cpp.TYPES


def describe(at: np.ndarray, codec: GroupedBits, keys_HRD: Tensor, values_HRD: Tensor) -> None:
    """Write sizes and addresses of a layer into an element of ``quantiser.GROUP``.

    Args:
        keys_HRD: those of the tail, and so are the values; contiguous.
    """
    rows = codec.layout
    quantiser.GROUP.point(
        at, codec.dtype, key_codes=codec.key_codes, value_codes=codec.value_codes, group=codec.group, key_step=codec.key_step,
        key_zero=codec.key_zero, value_step=codec.value_step, value_zero=codec.value_zero, tail_keys=keys_HRD,
        tail_values=values_HRD, hadamard=hadamard(codec.value_size, rows.device),
    )  # fmt: skip
    # The calls check nothing: what they may read and write follows from these numbers.
    at["heads"], at["rows"], at["capacity"], at["channels"] = rows.H, rows.rows, rows.capacity, codec.key_size
    at["bits"], at["groups"], at["value_group"] = codec.bits, codec.key_step.shape[2], codec.value_group
    at["tail"], at["tail_room"] = codec.tail, keys_HRD.shape[1]
    at["full"], at["pairs"], at["type"] = codec.group_rows, pairs_of(rows.capacity), cpp.TYPES[codec.dtype]


class CompiledBits(GroupedBits):
    """The same rows as ``GroupedBits`` holds, up to the order of sums: where the rounding decides which rows are most alike,
    they may share other groups."""

    def read_all(self, *, values: bool = True) -> None:
        # Open rows can lack their values alone (`overflow`), which the plain form then reads.
        if self.open or not fits(self):
            super().read_all(values=values)
            return
        self.scratch.lend(self)
        quantiser.load().locret_open(self._described().ctypes.data, values, torch.get_num_threads())
        self.scratch.complete = values

    def _quantise(self, ready: int) -> None:
        if not fits(self):
            super()._quantise(ready)
            return
        at = self._described()
        at["ready"] = ready
        quantiser.load().locret_quantise(at.ctypes.data, 1, torch.get_num_threads())

    def _described(self) -> np.ndarray:
        """The layer with the scratch beside it, as the calls read it."""
        at = np.zeros(1, quantiser.GROUP.dtype)
        describe(at[0], self, self.tail_keys[0], self.tail_values[0])
        quantiser.GROUP.point(at[0], self.dtype, keys=self.scratch.keys, values=self.scratch.values)
        # All layers share the scratch, so it may have room for more rows than this one.
        at["room"] = self.scratch.keys.shape[2]
        return at
