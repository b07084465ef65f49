"""Causal importance scores (CIS): targets and loss. Pure functions of tensors; no model, no cache.

Source: Locret, section 3.3; the log-probability target and the top-weighted loss are this project's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TARGETS = ("logit", "log_prob")


def answer_logits(q_BQTD: Tensor, k_BHSD: Tensor, q_pos_T: Tensor, scaling: float) -> Tensor:
    """Scaled causal logits ``[B, H, G, T, S]`` (float32) of queries over every slot; future slots are ``-inf``.

    ``q`` and ``k`` are after RoPE; slot ``s`` is at position ``s`` and query ``t`` at ``q_pos_T[t]``.
    """
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    q = q_BQTD.reshape(B, H, Q // H * T, D).float() * scaling
    logits = (q @ k_BHSD.float().transpose(-1, -2)).view(B, H, Q // H, T, S)
    future_TS = torch.arange(S, device=logits.device) > q_pos_T[:, None]
    return logits.masked_fill(future_TS, float("-inf"))


def cis_target(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    q_pos_T: Tensor,
    scaling: float,
    *,
    kind: str = "logit",
    floor: float = -12.0,
    block: int = 64,
) -> Tensor:
    """Target importance ``[B, H, S]`` (float32): the maximum over answer queries and group of each slot's logit.

    ``kind="logit"`` is the paper's (raw, pre-softmax logits); ``kind="log_prob"`` first subtracts the log-sum-exp of each
    query's row, so that scores of different heads compare, and clips at ``floor`` (nats). Queries are read ``block`` at
    a time, so memory does not grow with the answer.
    """
    if kind not in TARGETS:
        raise ValueError(f"target={kind!r} is unknown; known: {', '.join(TARGETS)}")
    best_BHS = None
    for start in range(0, q_BQTD.shape[2], block):
        part = slice(start, start + block)
        logits = answer_logits(q_BQTD[:, :, part], k_BHSD, q_pos_T[part], scaling)
        if kind == "log_prob":
            logits -= logits.logsumexp(-1, keepdim=True)
        part_BHS = logits.amax((2, 3))
        best_BHS = part_BHS if best_BHS is None else torch.maximum(best_BHS, part_BHS)
    if best_BHS is None:
        raise ValueError("a target needs at least one answer query")
    return best_BHS.clamp_min(floor) if kind == "log_prob" else best_BHS


def cis_loss(
    predicted_BHS: Tensor,
    target_BHS: Tensor,
    *,
    smoothing: float = 0.0025,
    top_fraction: float = 0.05,
    top_weight: float = 1.0,
    beta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``(regression, smooth)``, two scalars whose sum is one layer's loss.

    Regression is SmoothL1(``beta``) averaged over slots and heads; the ``top_fraction`` slots of highest target in each
    head weigh ``top_weight`` (1 is the paper's loss). ``smooth`` is ``smoothing`` times the mean squared difference of
    neighbouring predictions.
    """
    regression_BHS = F.smooth_l1_loss(predicted_BHS, target_BHS, beta=beta, reduction="none")
    if top_weight != 1.0:
        top = max(1, round(top_fraction * target_BHS.shape[-1]))
        weight_BHS = torch.ones_like(target_BHS).scatter(-1, target_BHS.topk(top, dim=-1).indices, top_weight)
        regression = (regression_BHS * weight_BHS).sum() / weight_BHS.sum()
    else:
        regression = regression_BHS.mean()
    smooth = (
        smoothing * predicted_BHS.diff(dim=-1).square().mean()
        if predicted_BHS.shape[-1] > 1
        else predicted_BHS.new_zeros(())
    )
    return regression, smooth


def top_recall(predicted_BHS: Tensor, target_BHS: Tensor, fraction: float = 0.1) -> Tensor:
    """Share of the true top ``fraction`` of slots that the prediction's top ``fraction`` holds; a scalar in [0, 1]."""
    top = max(1, int(fraction * target_BHS.shape[-1]))
    mine = torch.zeros_like(target_BHS, dtype=torch.bool).scatter(-1, predicted_BHS.topk(top, dim=-1).indices, True)
    return mine.gather(-1, target_BHS.topk(top, dim=-1).indices).float().mean()
