"""Attention of the newest queries, and the base of scores that are weights.

``a`` is the attention of one query to one slot, the mean over the query heads that share the slot's key (RoCo, appendix A).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Score, Slots


def recent_attention(slots: Slots, newest: int, but: int = 0) -> Tensor:
    """``sum of a`` ``[B, H, S]`` over the ``newest`` queries ``but`` the very last ones, each over the slots up to its own; zero
    at padding."""
    q_BQWD, k_BHSD = slots.queries(), slots.keys()
    end = q_BQWD.shape[2] - but

    def attention(q: Tensor, k: Tensor, heads: slice = slice(None)) -> Tensor:
        S = k.shape[2]
        W = min(newest - but, end, S - but)
        if W < 1:
            return torch.zeros(k.shape[:3], device=k.device)
        return F.pad(slots.attention(q[:, :, end - W : end], k[:, :, : S - but], heads), (0, but))

    if slots.lengths is None:
        return attention(q_BQWD, k_BHSD)
    _, H, S = slots.positions.shape
    out_BHS = torch.zeros(1, H, S, device=k_BHSD.device)
    G = q_BQWD.shape[1] // H
    for h, n in enumerate(slots.lengths):
        group = slice(h * G, (h + 1) * G)
        q_1GWD, k_11ND = q_BQWD[:, group], k_BHSD[:, h : h + 1, S - n :]
        out_BHS[0, h, S - n :] = attention(q_1GWD, k_11ND, group)[0, 0]
    return out_BHS


class Weight(Score):
    """Base of scores that are weights themselves, at least 0: attention received, or information in nats."""

    by_query_head: ClassVar[bool] = True

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return scores_BHS.clamp(min=torch.finfo(scores_BHS.dtype).tiny).log()
