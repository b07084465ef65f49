"""Top-k with protected rows, and compaction by one index: the definitions, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..bounds import check_moves


def select_rows(score_BHS: Tensor, protected_BHS: Tensor, keep: int) -> Tensor:
    """Rows ``[B, H, keep]`` (int64, ascending) that stay: protected ones first, then those of the largest score; ties go to
    the newer row, so runs repeat exactly.

    Raises:
        ValueError: ``keep`` outside ``1..S``.
    """
    S = check_keep(score_BHS, keep)
    score_BHS = score_BHS.float().masked_fill(protected_BHS, float("inf"))
    newest_first = score_BHS.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :keep]
    return (S - 1 - newest_first).sort(dim=-1).values


def check_keep(score_BHS: Tensor, keep: int) -> int:
    """The number of rows ``S``; raises ValueError where ``keep`` is not within ``1..S``."""
    S = score_BHS.shape[-1]
    if not 1 <= keep <= S:
        raise ValueError(f"keep={keep} must be at least 1 and at most the {S} rows there are")
    return S


def compact_rows(buffers: Sequence[Tensor], index_BHK: Tensor) -> None:
    """In place, row ``j`` of every buffer ``[B, H, S]`` or ``[B, H, S, D]`` becomes row ``index[j]``, for ``j < K``.

    ``index`` is ascending, so rows keep their order; rows from ``K`` on are left as they are.

    Raises:
        ValueError: ``K`` outside ``1..S``.
    """
    K = index_BHK.shape[-1]
    for rows in buffers:
        check_moves(index_BHK, rows)
        index = index_BHK if rows.dim() == 3 else index_BHK[..., None].expand(-1, -1, -1, rows.shape[-1])
        rows[:, :, :K] = torch.gather(rows, 2, index)
