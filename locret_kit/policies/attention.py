"""Attention of the newest queries, and the base of scores that are weights.

``a`` is the attention of one query to one slot, the mean over the query heads that share the slot's key (RoCo, appendix A).
"""

from __future__ import annotations

from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from locret_kernels.backend import function

from .base import Score, Slots


def recent_attention(slots: Slots, newest: int) -> Tensor:
    """``sum of a`` ``[B, H, S]`` over the ``newest`` queries, each over the slots up to its own; zero at padding."""
    q_BQWD, k_BHSD = slots.queries(), slots.keys()
    window_attention = function("window_attention", slots.backend)
    B, H, S = slots.positions.shape
    if slots.lengths is None:
        W = min(newest, q_BQWD.shape[2], S)
        return window_attention(q_BQWD[:, :, -W:], k_BHSD, slots.scaling)
    out_BHS = torch.zeros(B, H, S, device=k_BHSD.device)
    G = q_BQWD.shape[1] // H
    for (b, h), n in zip(product(range(B), range(H)), slots.lengths, strict=True):
        W = min(newest, q_BQWD.shape[2], n)
        if W:
            q_1GWD = q_BQWD[b : b + 1, h * G : (h + 1) * G, -W:]
            k_11ND = k_BHSD[b : b + 1, h : h + 1, S - n :]
            out_BHS[b, h, S - n :] = window_attention(q_1GWD, k_11ND, slots.scaling)[0, 0]
    return out_BHS


class Weight(Score):
    """Base of scores that are weights themselves, at least 0: attention received, or information in nats."""

    by_query_head: ClassVar[bool] = True

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return scores_BHS.clamp(min=torch.finfo(scores_BHS.dtype).tiny).log()
