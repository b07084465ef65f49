"""Causal importance scores (CIS): targets and loss. Pure functions of tensors; no model, no cache.

Source: Locret, section 3.3; the log-probability target and the top-weighted loss are this project's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.backend import choose, function

TARGETS = ("logit", "log_prob")


def cis_target(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    q_pos_T: Tensor,
    scaling: float,
    *,
    kind: str = "logit",
    floor: float = -12.0,
    backend: str | None = None,
) -> Tensor:
    """Target importance ``[B, H, S]`` (float32): the maximum over answer queries and group of each slot's scaled logit.

    ``q`` and ``k`` are after RoPE; slot ``s`` is at position ``s`` and query ``t`` at ``q_pos_T[t]``, which sees no later
    slot. ``kind="logit"`` is the paper's (raw, pre-softmax logits); ``kind="log_prob"`` first subtracts the log-sum-exp of
    each query's row, so that scores of different heads compare, and clips at ``floor`` (nats). ``backend``: of
    ``locret_kernels``, by default triton on CUDA in half precision and the reference otherwise.

    Raises:
        ValueError: an unknown kind, or no query.
    """
    if kind not in TARGETS:
        raise ValueError(f"target={kind!r} is unknown; known: {', '.join(TARGETS)}")
    column_max = function("column_max", choose(backend, q_BQTD.device, q_BQTD.shape[-1], q_BQTD.dtype))
    best_BHS = column_max(q_BQTD, k_BHSD, q_pos_T, scaling, log_prob=kind == "log_prob")
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
