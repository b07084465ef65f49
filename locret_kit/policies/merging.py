"""Where evicted slots go instead of away: into slots of the same head that stay.

``Nearest`` folds each into the slot that is nearest to it; ``Lococo`` folds all of them into the pool, the least of what
stays, by a trained convolution (see ``pool``).

With ``Nearest``, a slot's key and value are the weighted means of those of the tokens folded into it. Keys are compared and
averaged **before RoPE**: what a kept slot stands for is content, and its position stays its own. Averages of keys rotated for
different positions would cancel in the fast dimensions. Values know no position and take the same weights.

A token weighs what its score says of the attention it draws (``Score.log_weight``), or the same as every other token. What
a slot has taken over is remembered beside it, so a later fold is a mean over all tokens again and the weights of a head sum
to the same before and after. Position, entry score and running statistics of a slot stay those of its own token.

To attention a merged slot is one key, not several: it draws what its mean key draws.
Source: the training-free baseline of attention pools, as Locret 4.4 combines eviction with LoCoCo (arXiv 2406.05317).

A merger is told of a layer's slots once (``told [B, H, S]``) and then folds one head after the other; ``remembers`` says
whether a slot carries the weight that it took over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backbones.families import BackboneSpec
from ..naming import nearest
from .base import Policy, Slots, rank_of
from .pool import ConvPool, SlotConvolution, load_pool, read_pool_config

METRICS = ("cosine", "l2")
WEIGHTS = ("score", "count")
TILE = 2**20
"""Similarities of evicted and kept keys that exist at once."""


@dataclass(frozen=True)
class Folded:
    """Slots of one head that take others over; every other slot that stays is as it was."""

    slots_R: Tensor
    """Their rows (int64, ascending)."""
    keys_RD: Tensor
    values_RD: Tensor
    gained_R: Tensor | None = None
    """Logarithm of the weight that each takes over, where a merger remembers it."""


def nearest_kept(keys_SD: Tensor, stay_S: Tensor, metric: str = "cosine", tile: int = TILE) -> Tensor:
    """The kept slot ``[E]`` (int64) whose key is nearest to that of each evicted slot, in the order of the evicted; ties go
    to the newer one. At least one slot stays; at most ``tile`` similarities exist at once, or one row of them."""
    newest_first_K = stay_S.nonzero().flatten().flip(0)
    leaving_ED, kept_KD = keys_SD[~stay_S], keys_SD[newest_first_K]
    # A key's own length changes nothing about which of the others is nearest.
    if metric == "cosine":
        kept_KD, handicap_K = F.normalize(kept_KD, dim=-1), kept_KD.new_zeros(())
    else:
        handicap_K = kept_KD.square().sum(-1) / 2
    pieces = leaving_ED.split(max(1, tile // len(kept_KD)))
    return newest_first_K[torch.cat([(piece @ kept_KD.T - handicap_K).argmax(-1) for piece in pieces])]


def fold_nearest(
    keys_SD: Tensor, values_SD: Tensor, log_weight_S: Tensor, stay_S: Tensor, metric: str = "cosine"
) -> Folded:
    """Fold every evicted slot of one head into the nearest that stays, by weighted means.

    Args:
        keys_SD: before RoPE; float32 or float64.
        values_SD: of the same dtype; the size of a value may differ from that of a key.
        log_weight_S: finite logarithms of the slots' weights, in any common unit.
        stay_S: bool. Where none stays there is nothing to fold into, and all are dropped.
    """
    if not stay_S.any() or stay_S.all():
        none_R = stay_S.new_empty(0, dtype=torch.int64)
        return Folded(none_R, keys_SD[none_R], values_SD[none_R], log_weight_S[none_R])
    leaving_E = (~stay_S).nonzero().flatten()
    slots_R, into_E = nearest_kept(keys_SD, stay_S, metric).unique(return_inverse=True)
    own_R, other_E = log_weight_S[slots_R], log_weight_S[leaving_E]
    top_R = own_R.scatter_reduce(0, into_E, other_E, "amax")  # weights are relative to the largest of a fold
    own_R, other_E = (own_R - top_R).exp(), (other_E - top_R[into_E]).exp()
    gained_R = torch.zeros_like(own_R).index_add(0, into_E, other_E)

    def mean(x_SD: Tensor) -> Tensor:
        total_RD = (own_R[:, None] * x_SD[slots_R]).index_add(0, into_E, other_E[:, None] * x_SD[leaving_E])
        return total_RD / (own_R + gained_R)[:, None]

    return Folded(slots_R, mean(keys_SD), mean(values_SD), top_R + gained_R.log())


@dataclass(frozen=True)
class Nearest:
    """Every evicted slot is folded into the kept slot of its head whose key, before RoPE, is nearest to its own."""

    metric: str = "cosine"
    """'cosine' or 'l2'."""
    weight: str = "score"
    """'score' or 'count': whether a token weighs what its score says, or as much as every other."""

    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, known in (("metric", METRICS), ("weight", WEIGHTS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"nearest({name}={value}): {name} must be one of: {', '.join(known)}.{nearest(value, known)}"
                )

    def bind(self, spec: BackboneSpec, device: torch.device) -> None:
        """Any backbone will do."""

    def told(self, policy: Policy, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor) -> Tensor:
        """Logarithm of what each slot's own token weighs ``[B, H, S]`` (float32), by the policy's score."""
        if self.weight == "count":
            return torch.zeros_like(scores_BHS, dtype=torch.float32)
        return policy.score.log_weight(scores_BHS).float()

    def fold(self, layer: int, keys_SD: Tensor, values_SD: Tensor, told_S: Tensor, stay_S: Tensor) -> Folded:
        """One head's slots that take others over."""
        return fold_nearest(keys_SD, values_SD, told_S, stay_S, self.metric)


def pool_slots(policy: Policy, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor, size: int) -> Tensor:
    """Boolean ``[B, H, S]``: the pool of each head, the ``size`` slots of lowest score among those that stay and that no scope
    protects, or as many as there are. In the next pool a merged slot is one like the others, by the score of its own token."""
    protected_BHS = policy.protected(slots)
    free_BHS = stay_BHS & ~protected_BHS
    place_BHS = rank_of(scores_BHS, protected_BHS, slots.valid).masked_fill(~free_BHS, -1)
    last_BHR = place_BHS.topk(min(size, place_BHS.shape[-1])).indices
    return torch.zeros_like(free_BHS).scatter_(-1, last_BHR, True) & free_BHS


def fold_convolved(
    convolution: SlotConvolution, keys_SD: Tensor, values_SD: Tensor, pool_S: Tensor, stay_S: Tensor
) -> Folded:
    """Fold every evicted slot of one head into its pool, by the layer's convolution.

    Args:
        keys_SD: before RoPE, as the values in float32 or float64.
        pool_S: bool, the pool; slots that stay. Where there is none, or nothing goes, nothing is folded.
    """
    if stay_S.all() or not pool_S.any():
        none_R = stay_S.new_empty(0, dtype=torch.int64)
        return Folded(none_R, keys_SD[none_R], values_SD[none_R])
    slots_L = (pool_S | ~stay_S).nonzero().flatten()
    keys_LD, values_LD = keys_SD[slots_L], values_SD[slots_L]
    weights_RL = convolution(torch.cat((keys_LD, values_LD), -1), pool_S[slots_L].nonzero().flatten())
    return Folded(pool_S.nonzero().flatten(), weights_RL @ keys_LD, weights_RL @ values_LD)


@dataclass(frozen=True)
class Lococo:
    """What is evicted is folded into the pool by LoCoCo's trained convolution; the slots that stay are the policy's."""

    pool: str
    """Folder of the trained pool."""

    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        read_pool_config(self.pool)

    @cached_property
    def weights(self) -> ConvPool:
        """Read once, when they are first needed."""
        return load_pool(self.pool)

    def bind(self, spec: BackboneSpec, device: torch.device) -> None:
        """Raise ValueError where the pool is not for this backbone."""
        self.weights.check_backbone(spec)
        self.weights.to(device)

    def told(self, policy: Policy, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor) -> Tensor:
        """The pool of each head."""
        return pool_slots(policy, slots, scores_BHS, stay_BHS, self.weights.config.slots)

    def fold(self, layer: int, keys_SD: Tensor, values_SD: Tensor, told_S: Tensor, stay_S: Tensor) -> Folded:
        """One head's pool, with what was evicted in it."""
        return fold_convolved(self.weights[layer], keys_SD, values_SD, told_S, stay_S)
