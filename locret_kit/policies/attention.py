"""Attention of the newest queries, and the base of scores that are weights.

``a`` is the attention of one query to one slot, the mean over the query heads that share the slot's key (RoCo, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Score, Slots


def recent_attention(slots: Slots, newest: int, but: int = 0) -> Tensor:
    """``sum of a`` ``[B, H, S]`` over the ``newest`` queries ``but`` the very last ones, each over the slots up to its own; zero
    at padding."""
    return of_recent_queries(slots, newest, slots.attention, slots.keys(), but=but)


def of_recent_queries(
    slots: Slots, newest: int, measure: Callable[..., Tensor], *rows_BHSD: Tensor, but: int = 0
) -> Tensor:
    """``measure`` ``[B, H, S]`` of the ``newest`` queries ``but`` the very last ones; zero at padding and at slots newer than
    those queries.

    Args:
        measure: function of queries ``[B, Q, W, D]``, of the rows, cut to the slots that the last of these queries sees, and of
            the query heads (a slice) whose queries they are.
        rows_BHSD: keys, and values where the measure needs them.
    """
    q_BQWD = slots.queries()
    end = q_BQWD.shape[2] - but

    def measured(q: Tensor, rows: Sequence[Tensor], heads: slice = slice(None)) -> Tensor:
        S = rows[0].shape[2]
        W = min(newest - but, end, S - but)
        if W < 1:
            return torch.zeros(rows[0].shape[:3], dtype=torch.float32, device=q.device)
        return F.pad(measure(q[:, :, end - W : end], *(x[:, :, : S - but] for x in rows), heads), (0, but))

    if slots.lengths is None:
        return measured(q_BQWD, rows_BHSD)
    _, H, S = slots.positions.shape
    out_BHS = torch.zeros(1, H, S, dtype=torch.float32, device=q_BQWD.device)
    G = q_BQWD.shape[1] // H
    for h, n in enumerate(slots.lengths):
        group = slice(h * G, (h + 1) * G)
        out_BHS[0, h, S - n :] = measured(q_BQWD[:, group], [x[:, h : h + 1, S - n :] for x in rows_BHSD], group)[0, 0]
    return out_BHS


class Weight(Score):
    """Base of scores that are weights themselves, at least 0: attention received, or information in nats."""

    by_query_head: ClassVar[bool] = True

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return scores_BHS.clamp(min=torch.finfo(scores_BHS.dtype).tiny).log()
