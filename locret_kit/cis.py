"""Causal importance scores (CIS): targets and losses. Pure functions of tensors; no model, no cache.

Source: Locret, section 3.3; the log-probability target and the top-weighted loss are this project's. Other targets and losses
name theirs. Each is a part: targets, losses and the queries that ask go together as one likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.backend import choose, function
from locret_kernels.column_max.reference import tile_logits

TARGETS = ("logit", "log_prob", "log_mass")


def cis_target(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    q_pos_T: Tensor,
    scaling: float,
    *,
    kind: str = "logit",
    floor: float = -12.0,
    window: int = 0,
    norms_BQS: Tensor | None = None,
    cap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Target importance ``[B, H, S]`` (float32): the maximum over answer queries and group of each slot's scaled logit.

    ``q`` and ``k`` are after RoPE; slot ``s`` is at position ``s`` and query ``t`` at ``q_pos_T[t]``, which sees no later
    slot. ``kind="logit"`` is the paper's (raw, pre-softmax logits); ``kind="log_prob"`` first subtracts the log-sum-exp of
    each query's row, so that scores of different heads compare, and clips at ``floor`` (nats). ``kind="log_mass"`` takes the
    logarithm of `attention_mass` instead, the maximum over the group, and clips too. ``norms_BQS``: of the values as each query
    head's part of the output projection has them; their logarithm is added before the maximum over the group (CriticalKV,
    arXiv 2502.03805; KVzip+ of KVzap). ``cap``, ``sinks_Q``: see ``backbones.handler.Softmax``; with them the reference computes,
    without them triton does on CUDA in half precision.

    Raises:
        ValueError: an unknown kind, or no query.
    """
    if kind not in TARGETS:
        raise ValueError(f"target={kind!r} is unknown; known: {', '.join(TARGETS)}")
    H, G = k_BHSD.shape[1], q_BQTD.shape[1] // k_BHSD.shape[1]
    if norms_BQS is not None:  # every query head by itself, until its norms are in
        k_BHSD = k_BHSD.repeat_interleave(G, 1)
    if kind == "log_mass":
        mass_BQS = attention_mass(q_BQTD, k_BHSD, q_pos_T, scaling, window, cap, sinks_Q)
        best_BHS = mass_BQS.unflatten(1, (k_BHSD.shape[1], -1)).amax(2).log()
    else:
        plain = cap is None and sinks_Q is None
        backend = choose(None if plain else "reference", q_BQTD.device, q_BQTD.shape[-1], q_BQTD.dtype)
        more = {} if plain else {"cap": cap, "sinks_Q": sinks_Q}
        best_BHS = function("column_max", backend)(
            q_BQTD, k_BHSD, q_pos_T, scaling, log_prob=kind == "log_prob", **more
        )
    if norms_BQS is not None:
        best_BHS = (best_BHS + norms_BQS.log()).unflatten(1, (H, G)).amax(2)
    return best_BHS if kind == "logit" else best_BHS.clamp_min(floor)


def attention_mass(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    q_pos_T: Tensor,
    scaling: float,
    window: int,
    cap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Mean attention ``[B, Q, S]`` (float32) that each slot gets from the queries more than ``window`` tokens after it; 0 where
    there is none. Source: KVpop, arXiv 2607.05061 (its retention target, before the logarithm).

    Raises:
        ValueError: no query.
    """
    B, H, S = k_BHSD.shape[:3]
    slots_S = torch.arange(S, device=q_BQTD.device)
    total_BHGS = torch.zeros(B, H, q_BQTD.shape[1] // H, S, dtype=torch.float32, device=q_BQTD.device)
    for part, logits in tile_logits(q_BQTD, k_BHSD, q_pos_T, scaling, cap):
        if sinks_Q is None:
            weights = logits.softmax(-1)
        else:
            sink = sinks_Q.float().view(H, -1, 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        total_BHGS += weights.masked_fill_(q_pos_T[part, None] - slots_S <= window, 0.0).sum(3)
    count_S = (q_pos_T[:, None] - slots_S > window).sum(0)
    return (total_BHGS / count_S.clamp_min(1)).flatten(1, 2)


def ranks(target_BHS: Tensor) -> Tensor:
    """Rank of each slot in its head, from 0 (least) to 1; ties in order of their places."""
    order = target_BHS.argsort(dim=-1, stable=True).argsort(-1)
    return order.float() / max(1, target_BHS.shape[-1] - 1)


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "smooth_l1": lambda mine, true, beta: F.smooth_l1_loss(mine, true, beta=beta, reduction="none"),
    "mse": lambda mine, true, beta: F.mse_loss(mine, true, reduction="none"),
    "bce_rank": lambda mine, true, beta: F.binary_cross_entropy_with_logits(mine, ranks(true), reduction="none"),
    "bce_mass": lambda mine, true, beta: F.binary_cross_entropy_with_logits(
        mine, true.exp().clamp(max=1), reduction="none"
    ),
}
"""Losses of one slot's prediction: SmoothL1 (Locret), squared error (KVzap), and cross-entropy of a prediction as a logit, where
the slot's rank or the attention itself (Fast KVzip) is the wanted probability."""
LOSSES = (*ELEMENTWISE, "boundary")


def boundary_loss(predicted_BHS: Tensor, target_BHS: Tensor, keeps: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Logistic loss of every slot against the last one that a budget keeps, mean over slots, heads and budgets; a scalar.

    With a budget of ``k`` slots, slot ``c`` is the ``k``-th by target; every slot above it should be predicted above it, every
    one below it below: ``softplus(-y (s - s_c) / temperature)``, ``y`` 1 or -1. Source: KVpop, arXiv 2607.05061 (which compares
    ``c`` with the one token that leaves the window, at one budget).

    Raises:
        ValueError: a budget that is not at least 1 and below the number of slots.
    """
    S = target_BHS.shape[-1]
    if wrong := [k for k in keeps if not 1 <= k < S]:
        raise ValueError(f"keeps={wrong[0]} must be at least 1 and below the {S} slots")
    order_BHS = target_BHS.argsort(dim=-1, descending=True, stable=True)
    sorted_BHS = predicted_BHS.gather(-1, order_BHS)
    total = predicted_BHS.new_zeros(())
    for k in keeps:
        apart_BHS = sorted_BHS - sorted_BHS[..., k - 1 : k]
        sign_S = torch.where(torch.arange(S, device=target_BHS.device) < k, -1.0, 1.0).to(apart_BHS)
        each_BHS = F.softplus(sign_S * apart_BHS / temperature)
        total = total + (each_BHS.sum() - each_BHS[..., k - 1].sum()) / (each_BHS.numel() // S * (S - 1))
    return total / len(keeps)


def drawn_budgets(slots: int, n: int) -> list[int]:
    """``n`` budgets from a sixteenth to a half of the slots, uniform in their logarithm, by torch's generator."""
    low, high = math.log(max(1, slots / 16)), math.log(max(1, slots / 2))
    draw = torch.rand(n, dtype=torch.float32, device="cpu").tolist()
    return [min(slots - 1, max(1, round(math.exp(low + (high - low) * x)))) for x in draw]


def cis_loss(
    predicted_BHS: Tensor,
    target_BHS: Tensor,
    *,
    kind: str = "smooth_l1",
    smoothing: float = 0.0025,
    top_fraction: float = 0.05,
    top_weight: float = 1.0,
    beta: float = 1.0,
    budgets: int = 4,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``(regression, smooth)``, two scalars whose sum is one layer's loss.

    Regression is a loss of `ELEMENTWISE` averaged over slots and heads, by default SmoothL1(``beta``); the ``top_fraction``
    slots of highest target in each head weigh ``top_weight`` (1 is the paper's loss). ``kind="boundary"`` is `boundary_loss` at
    ``budgets`` `drawn_budgets` instead. ``smooth`` is ``smoothing`` times the mean squared difference of neighbours.

    Raises:
        ValueError: an unknown kind, or a boundary among fewer than two slots.
    """
    if kind not in LOSSES:
        raise ValueError(f"loss={kind!r} is unknown; known: {', '.join(LOSSES)}")
    if kind == "boundary":
        regression = boundary_loss(predicted_BHS, target_BHS, drawn_budgets(target_BHS.shape[-1], budgets), temperature)
        return regression, _roughness(predicted_BHS, smoothing)
    regression_BHS = ELEMENTWISE[kind](predicted_BHS, target_BHS, beta)
    if top_weight != 1.0:
        top = max(1, round(top_fraction * target_BHS.shape[-1]))
        weight_BHS = torch.ones_like(target_BHS).scatter(-1, target_BHS.topk(top, dim=-1).indices, top_weight)
        regression = (regression_BHS * weight_BHS).sum() / weight_BHS.sum()
    else:
        regression = regression_BHS.mean()
    return regression, _roughness(predicted_BHS, smoothing)


def _roughness(predicted_BHS: Tensor, smoothing: float) -> Tensor:
    if predicted_BHS.shape[-1] < 2:
        return predicted_BHS.new_zeros(())
    return smoothing * predicted_BHS.diff(dim=-1).square().mean()


def top_recall(predicted_BHS: Tensor, target_BHS: Tensor, fraction: float = 0.1) -> Tensor:
    """Share of the true top ``fraction`` of slots that the prediction's top ``fraction`` holds; a scalar in [0, 1]."""
    top = max(1, int(fraction * target_BHS.shape[-1]))
    mine = torch.zeros_like(target_BHS, dtype=torch.bool).scatter(-1, predicted_BHS.topk(top, dim=-1).indices, True)
    return mine.gather(-1, target_BHS.topk(top, dim=-1).indices).float().mean()


def mean_of_next(scores_BHS: Tensor, positions_BHS: Tensor, lookahead: int) -> Tensor:
    """Mean ``[B, H, S]`` of each slot's score and those of the slots of the next ``lookahead`` tokens that are there. Positions
    ascend in every head."""
    total_BHS, many_BHS = scores_BHS.clone(), torch.ones_like(scores_BHS)
    for step in range(1, min(lookahead, scores_BHS.shape[-1] - 1) + 1):
        near_BHS = positions_BHS[..., step:] - positions_BHS[..., :-step] <= lookahead
        total_BHS[..., :-step] += torch.where(near_BHS, scores_BHS[..., step:], 0.0)
        many_BHS[..., :-step] += near_BHS
    return total_BHS / many_BHS
