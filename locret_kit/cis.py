"""Causal importance scores (CIS): targets and losses. Pure functions of tensors; no model, no cache.

Source: Locret, section 3.3; the log-probability target and the top-weighted loss are this project's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.backend import choose, function

from .naming import check_name

TARGETS = ("logit", "log_prob")
FLOOR = -12.0
"""Lower clip of log-probabilities in training, nats: how far below nothing is asked of a slot does not matter."""
TOP = 0.05
"""Share of each head's slots, those of highest target, that ``loss.top_weight`` weighs."""


def cis_target(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    q_pos_T: Tensor,
    scaling: float,
    *,
    kind: str = "logit",
    floor: float = FLOOR,
    cap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Target importance ``[B, H, S]`` (float32): the maximum over answer queries and group of each slot's scaled logit.

    ``q`` and ``k`` are after RoPE; slot ``s`` is at position ``s`` and query ``t`` at ``q_pos_T[t]``, which sees no later
    slot. ``kind="logit"`` is the paper's (raw, pre-softmax logits); ``kind="log_prob"`` first subtracts the log-sum-exp of
    each query's row, so that scores of different heads compare, and clips at ``floor`` (nats). ``cap``, ``sinks_Q``: see
    ``backbones.handlers.Softmax``; with them the reference computes, without them triton does on CUDA in half precision.

    Raises:
        ValueError: an unknown kind, or no query.
    """
    check_name("target", kind, TARGETS)
    plain = cap is None and sinks_Q is None
    backend = choose(None if plain else "reference", q_BQTD.device, q_BQTD.shape[-1], q_BQTD.dtype)
    more = {} if plain else {"cap": cap, "sinks_Q": sinks_Q}
    best_BHS = function("column_max", backend)(q_BQTD, k_BHSD, q_pos_T, scaling, log_prob=kind == "log_prob", **more)
    return best_BHS if kind == "logit" else best_BHS.clamp_min(floor)


def ranks(target_BHS: Tensor) -> Tensor:
    """Rank of each slot in its head, from 0 (least) to 1; ties in order of their places."""
    order = target_BHS.argsort(dim=-1, stable=True).argsort(-1)
    return order.float() / max(1, target_BHS.shape[-1] - 1)


@dataclass(frozen=True)
class SmoothL1:
    """SmoothL1 of every slot's prediction. Source: Locret, equation 3."""

    beta: Annotated[float, Gt(0)] = 1.0
    """Difference at which it goes from quadratic to linear, in the target's unit."""

    def __call__(self, predicted_BHS: Tensor, target_BHS: Tensor) -> Tensor:
        return F.smooth_l1_loss(predicted_BHS, target_BHS, beta=self.beta, reduction="none")


Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses ``[B, H, S]`` of the slots from their predictions and targets, or a scalar of them all."""


def cis_loss(
    predicted_BHS: Tensor,
    target_BHS: Tensor,
    *,
    loss: Loss = SmoothL1(),
    smoothing: float = 0.0025,
    top_fraction: float = TOP,
    top_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``(regression, smooth)``, two scalars that sum to one layer's loss.

    Regression is ``loss`` averaged over slots and heads. The ``top_fraction`` of each head's slots with the highest
    targets weighs ``top_weight`` (1 is the paper's loss). A scalar loss is used unchanged. ``smooth`` is
    ``smoothing`` times the mean squared difference of neighbours.
    """
    each = loss(predicted_BHS, target_BHS)
    if each.dim() and top_weight != 1.0:
        top = max(1, round(top_fraction * target_BHS.shape[-1]))
        weight_BHS = torch.ones_like(target_BHS).scatter(-1, target_BHS.topk(top, dim=-1).indices, top_weight)
        regression = (each * weight_BHS).sum() / weight_BHS.sum()
    else:
        regression = each.mean()
    if predicted_BHS.shape[-1] < 2:
        return regression, predicted_BHS.new_zeros(())
    return regression, smoothing * predicted_BHS.diff(dim=-1).square().mean()


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
