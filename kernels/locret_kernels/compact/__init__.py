"""Compaction of buffers: rows that stay move to the front, in place. The definition, in torch."""

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from .. import check_keep

__all__ = ["compact_rows"]

Addresses = MutableMapping[tuple[int, ...], Tensor]
"""Tables on the device of the addresses where buffers begin, keyed by their contents."""


def compact_rows(buffers: Sequence[Sequence[Tensor]], index_LHK: Tensor, addresses: Addresses | None = None) -> None:
    """Move row ``index[j]`` of every buffer ``[H, S]`` or ``[H, S, D]`` of a layer to row ``j``, for ``j < K``, in place.

    ``index`` ascends, so rows keep their order; rows from ``K`` on are left as they are.

    Args:
        buffers: of each layer, one layer's after another's.
        addresses: tables that were made for earlier calls; kernels add theirs.

    Raises:
        ValueError: ``K`` outside ``1..S``.
    """
    for layer, index_HK in zip(buffers, index_LHK.long(), strict=True):
        for rows in layer:
            check_keep(index_HK.shape[1], rows.shape[1])
            index = index_HK if rows.dim() == 2 else index_HK[..., None].expand(-1, -1, rows.shape[-1])
            rows[:, : index.shape[1]] = torch.gather(rows, 1, index)
