"""Rows in few bits as the compiled calls on a CPU read them (see ``locret_kernels.native``), and the quantising of full groups,
in all layers by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from locret_kernels import native
from locret_kernels.hadamard import hadamard
from locret_kernels.ragged_decode import PackedRows

from ..cache.storage.groups import pairs_of
from ..cache.storage.quantised import QuantisedLayer


def point_at(at: np.ndarray, packed: PackedRows, rows: QuantisedLayer) -> None:
    """Write the addresses of rows in few bits into an element of ``native.PACKED``."""
    native.load_quantiser()  # compiled before a group is full
    tables, groups, _ = packed.key_step_TMD.shape
    found = (
        packed.key_codes_NX, packed.value_codes_NX, packed.group_N, packed.key_step_TMD, packed.key_zero_TMD,
        packed.value_step_NC, packed.value_zero_NC, packed.tail_keys_PRD, packed.tail_values_PRD,
    )  # fmt: skip
    for name, x in zip(native.PACKED.names or (), found, strict=False):
        at[name] = x.data_ptr()
    at["bits"], at["group_bytes"], at["groups"], at["sharing"] = (
        packed.bits,
        packed.group_N.itemsize,
        groups,
        rows.H // tables,
    )
    at["value_groups"], at["tail_room"], at["tail"] = (
        packed.value_step_NC.shape[1],
        packed.tail_keys_PRD.shape[1],
        rows.tail,
    )


def can_quantise(rows: QuantisedLayer) -> bool:
    """Whether the call takes a layer: heads of equal length, of one text, and keys as wide as values."""
    return (
        type(rows) is QuantisedLayer
        and rows.B == 1
        and rows.group.dtype == torch.int16
        and rows.key_size == rows.value_size
    )


class FullTail(NamedTuple):
    """A layer whose newest rows are counted, and a copy ``[H, tail, D]`` of its tail, for which it has no room."""

    rows: QuantisedLayer
    keys: Tensor
    values: Tensor


def quantise(full: Sequence[FullTail]) -> None:
    """Quantise the groups that are full, as ``finish_block`` does, up to the order of sums."""
    found, first = np.zeros(len(full), native.GROUP), full[0].rows
    mirror = hadamard(first.value_size, first.device).contiguous()
    for at, (rows, keys, values) in zip(found, full, strict=True):
        at["ready"] = (rows.tail - rows.residual) // rows.group_rows * rows.group_rows
        tensors = (
            rows.key_codes, rows.value_codes, rows.group, rows.key_step, rows.key_zero, rows.value_step, rows.value_zero, keys,
            values, mirror,
        )  # fmt: skip
        for name, x in zip(native.GROUP.names or (), tensors, strict=False):
            at[name] = x.data_ptr()
        at["heads"], at["rows"], at["capacity"], at["channels"] = rows.H, rows.rows, rows.capacity, rows.key_size
        at["bits"], at["groups"], at["value_group"] = rows.bits, rows.key_step.shape[2], rows.value_group
        at["tail"], at["full"], at["pairs"] = rows.tail, rows.group_rows, pairs_of(rows.capacity)
        at["type"] = native.TYPES[rows.dtype]
    native.load_quantiser().locret_quantise(found.ctypes.data, len(found), torch.get_num_threads())
    for at, (rows, keys, values) in zip(found, full, strict=True):
        ready = int(at["ready"])
        rows.tail -= ready
        rows.tail_keys[0, :, : rows.tail], rows.tail_values[0, :, : rows.tail] = keys[:, ready:], values[:, ready:]
