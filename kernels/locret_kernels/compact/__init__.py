"""Compaction of buffers: rows that stay move to the front, in place; and the index of those rows. The definition, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["compact_rows", "kept_rows"]


def compact_rows(buffers: Sequence[Tensor], index_BHK: Tensor) -> None:
    """Move row ``index[j]`` of every buffer ``[B, H, S]`` or ``[B, H, S, D]`` to row ``j``, for ``j < K``, in place.

    ``index`` ascends, so rows keep their order; rows from ``K`` on are left as they are.

    Raises:
        ValueError: ``K`` outside ``1..S``.
    """
    K = index_BHK.shape[-1]
    for rows in buffers:
        check_moves(index_BHK, rows)
        index = index_BHK if rows.dim() == 3 else index_BHK[..., None].expand(-1, -1, -1, rows.shape[-1])
        rows[:, :, :K] = torch.gather(rows, 2, index)


def kept_rows(stay_BHS: Tensor, keep: int) -> Tensor:
    """Row indices ``[B, H, keep]`` (int64, ascending) of a boolean with ``keep`` True in each head."""
    place_BHS = (stay_BHS.cumsum(-1) - 1).masked_fill_(~stay_BHS, keep)  # the others share one place after them
    row_S = torch.arange(place_BHS.shape[-1], device=place_BHS.device).expand_as(place_BHS)
    return place_BHS.new_empty(*place_BHS.shape[:-1], keep + 1).scatter_(-1, place_BHS, row_S)[..., :keep]


def check_moves(index_BHK: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless between one and all of a buffer's rows stay."""
    K, S = index_BHK.shape[2], rows.shape[2]
    if not 1 <= K <= S:
        raise ValueError(f"index: {K} rows must be at least 1 and at most the {S} rows of a buffer")
