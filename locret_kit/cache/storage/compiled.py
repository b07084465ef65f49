"""Rows in few bits that compiled calls (``locret_kernels.quantise``) read and quantise while a prompt is read on a CPU: of one
text, with as many rows for every head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from locret_kernels import cpp
from locret_kernels.hadamard import hadamard
from locret_kernels.quantise import cpu as quantiser

from .groups import pairs_of
from .quantised import QuantisedLayer


def fits(rows: QuantisedLayer) -> bool:
    """Whether the calls take a layer: heads of equal length, and keys as wide as values."""
    alike = rows.key_size == rows.value_size and not rows.ragged
    return alike and rows.group.dtype == torch.int16 and rows.device.type == "cpu" and rows.dtype in cpp.TYPES


def describe(at: np.ndarray, rows: QuantisedLayer, keys_HRD: Tensor, values_HRD: Tensor) -> None:
    """Write sizes and addresses of a layer into an element of ``quantiser.GROUP``.

    Args:
        keys_HRD: those of the tail, and so are the values; contiguous.
    """
    tensors = (
        rows.key_codes, rows.value_codes, rows.group, rows.key_step, rows.key_zero, rows.value_step, rows.value_zero, keys_HRD,
        values_HRD, hadamard(rows.value_size, rows.device),
    )  # fmt: skip
    for name, x in zip(quantiser.GROUP.names or (), tensors, strict=False):
        at[name] = x.data_ptr()
    at["heads"], at["rows"], at["capacity"], at["channels"] = rows.H, rows.rows, rows.capacity, rows.key_size
    at["bits"], at["groups"], at["value_group"] = rows.bits, rows.key_step.shape[2], rows.value_group
    at["tail"], at["tail_room"] = rows.tail, keys_HRD.shape[1]
    at["full"], at["pairs"], at["type"] = rows.group_rows, pairs_of(rows.capacity), cpp.TYPES[rows.dtype]


class CompiledLayer(QuantisedLayer):
    """The same rows as ``QuantisedLayer`` holds, up to the order of sums: where the rounding decides which rows are most alike,
    they may share other groups."""

    def _open(self, *, values: bool = True) -> None:
        if self.scratch.owner is self or not fits(self):
            super()._open(values=values)
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
        at = np.zeros(1, quantiser.GROUP)
        describe(at[0], self, self.tail_keys[0], self.tail_values[0])
        at["keys"], at["values"] = self.scratch.keys.data_ptr(), self.scratch.values.data_ptr()
        at["room"] = self.scratch.keys.shape[2]
        return at
