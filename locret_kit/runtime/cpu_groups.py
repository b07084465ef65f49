"""Rows in few bits as ``locret_kernels.decoder_step`` reads them, and the quantising of full groups in all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from locret_kernels.decoder_step.cpu import PACKED
from locret_kernels.quantise import cpu as quantiser
from locret_kernels.ragged_decode import PackedRows

from ..cache.storage.compiled import describe
from ..cache.storage.quantised import GroupedBits


def point_at(at: np.ndarray, packed: PackedRows, codec: GroupedBits) -> None:
    """Write the addresses of rows in few bits into an element of ``PACKED``."""
    quantiser.load()  # compiled before a group is full
    PACKED.point(
        at, codec.dtype, key_codes=packed.key_codes_NX, value_codes=packed.value_codes_NX, group=packed.group_N,
        key_step=packed.key_step_PMD, key_zero=packed.key_zero_PMD, value_step=packed.value_step_NC,
        value_zero=packed.value_zero_NC, tail_keys=packed.tail_keys_PRD, tail_values=packed.tail_values_PRD,
    )  # fmt: skip
    at["bits"], at["group_bytes"], at["groups"] = packed.bits, packed.group_N.itemsize, packed.key_step_PMD.shape[1]
    at["value_groups"], at["tail_room"] = packed.value_step_NC.shape[1], packed.tail_keys_PRD.shape[1]
    at["tail"] = codec.tail


class FullTail(NamedTuple):
    """A layer whose newest rows are counted, and a copy ``[H, tail, D]`` of its tail, for which it has no room."""

    codec: GroupedBits
    keys: Tensor
    values: Tensor


def quantise(full: Sequence[FullTail]) -> None:
    """Quantise the groups that are full, as ``finish_block`` does, up to the order of sums."""
    found = np.zeros(len(full), quantiser.GROUP.dtype)
    for at, (codec, keys, values) in zip(found, full, strict=True):
        at["ready"] = (codec.tail - codec.residual) // codec.group_rows * codec.group_rows
        describe(at, codec, keys, values)
    quantiser.load().locret_quantise(found.ctypes.data, len(found), torch.get_num_threads())
    for at, (codec, keys, values) in zip(found, full, strict=True):
        ready = int(at["ready"])
        codec.tail -= ready
        codec.tail_keys[0, :, : codec.tail], codec.tail_values[0, :, : codec.tail] = keys[:, ready:], values[:, ready:]
