"""Evicted slots are folded into slots of the same head that stay.

``Nearest`` folds each into the slot that is nearest to it; ``Lococo`` (``methods/lococo.py``) folds all of them into the pool,
the slots of lowest score that stay, by a trained convolution.

With ``Nearest``, a slot's key and value are the weighted means of those of the tokens folded into it. Keys are compared and
averaged **before RoPE**: what a kept slot stands for is content, and its position stays its own. Averages of keys rotated for
different positions would cancel in the fast dimensions. Values know no position and take the same weights.

A token weighs what its score says of the attention it draws (``Score.log_weight``), or the same as every other token. What
a slot has taken over is remembered beside it, so a later fold is a mean over all tokens again and the weights of a head sum
to the same before and after. Position, entry score and running statistics of a slot stay those of its own token. Pinned
slots take nothing over: they are the text as it was read.

To attention a merged slot is one key, not several: it draws what its mean key draws.
Source: the training-free baseline of attention pools, as Locret 4.4 combines eviction with LoCoCo (arXiv 2406.05317).

A merger is asked once for the weights of a layer's slots (``slot_weights``), and then merges one head after the other;
``tracks_weight`` says whether a slot carries the weight that it took over.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base import Merge, Merged, Score, Slots
from ..registry import part, register
from .locret import NAMES, SCOPES, SCORE

Metric = Literal["cosine", "l2"]
TILE = 2**20
"""Similarities of evicted and kept keys that exist at once."""


def nearest_kept(keys_SD: Tensor, stay_S: Tensor, metric: Metric = "cosine", tile: int = TILE) -> Tensor:
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


def merge_nearest(
    keys_SD: Tensor, values_SD: Tensor, log_weight_S: Tensor, stay_S: Tensor, metric: Metric = "cosine"
) -> Merged:
    """Fold every evicted slot of one head into the nearest that stays, by weighted means.

    Args:
        keys_SD: before RoPE; float32 or float64.
        values_SD: of the same dtype; the size of a value may differ from that of a key.
        log_weight_S: finite logarithms of the slots' weights, in any common unit.
        stay_S: bool. Where none stays there is nothing to fold into, and all are dropped.
    """
    if not stay_S.any() or stay_S.all():
        none_R = stay_S.new_empty(0, dtype=torch.int64)
        return Merged(none_R, keys_SD[none_R], values_SD[none_R], log_weight_S[none_R])
    leaving_E = (~stay_S).nonzero().flatten()
    slots_R, into_E = nearest_kept(keys_SD, stay_S, metric).unique(return_inverse=True)
    own_R, other_E = log_weight_S[slots_R], log_weight_S[leaving_E]
    top_R = own_R.scatter_reduce(0, into_E, other_E, "amax")  # weights are relative to the largest of a fold
    own_R, other_E = (own_R - top_R).exp(), (other_E - top_R[into_E]).exp()
    weight_R = torch.zeros_like(own_R).index_add(0, into_E, other_E)

    def mean(x_SD: Tensor) -> Tensor:
        total_RD = (own_R[:, None] * x_SD[slots_R]).index_add(0, into_E, other_E[:, None] * x_SD[leaving_E])
        return total_RD / (own_R + weight_R)[:, None]

    return Merged(slots_R, mean(keys_SD), mean(values_SD), top_R + weight_R.log())


@part("merge", "nearest")
class Nearest(Merge):
    """Every evicted slot is folded into the kept slot of its head whose key, before RoPE, is nearest to its own."""

    metric: Metric = "cosine"
    """'cosine' or 'l2'."""
    weight: Literal["score", "count"] = "score"
    """'score' or 'count': whether a token weighs what its score says, or as much as every other."""

    tracks_weight: ClassVar[bool] = True

    def slot_weights(
        self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor
    ) -> Tensor:
        """Logarithm of what each slot's own token weighs ``[B, H, S]`` (float32), by the policy's score."""
        if self.weight == "count":
            return torch.zeros_like(scores_BHS, dtype=torch.float32)
        return score.log_weight(scores_BHS).float()

    def merge(self, layer: int, keys_SD: Tensor, values_SD: Tensor, weights_S: Tensor, stay_S: Tensor) -> Merged:
        """One head's slots that take others over."""
        return merge_nearest(keys_SD, values_SD, weights_S, stay_S, self.metric)


register(
    "merge-locret",
    "Locret, section 4.4",
    {**SCOPES, "merge": Nearest(), **SCORE},
    names=NAMES,
    keeps="as locret; evicted slots are averaged into the nearest kept one",
)
register(
    "merge",
    "{base} with an attention pool, Locret, section 4.4",
    {"merge": Nearest()},
    base="h2o",
    keeps="as h2o; evicted slots are averaged into the nearest kept one",
)
