"""Attention of the newest queries: SnapKV, arXiv 2404.14469 (pooled over neighbours), with PyramidKV, arXiv 2406.02069, whose
lower layers get more slots, and Ada-KV, arXiv 2407.11550, whose heads share a layer's slots by need; DefensiveKV, arXiv
2510.13334 (the most that any of them pays, and a prior for the rest); DropKV (what attention's output loses when one slot is
dropped, exactly); R-KV, arXiv 2505.24133 (less what other keys say too)."""

from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from ...backbones.handlers import Softmax
from ..base import Odd, Positive, Score, Slots, Weight, wide
from ..registry import Adaptive, Parts, Pyramid, PyramidAdaptive, Window, part, register
from ..slots import attention_of_each, of_recent_queries, recent_attention


@part("score", "window")
class WindowAttention(Weight):
    """``sum of a`` over the newest ``window`` queries, then the maximum over ``kernel`` neighbouring slots. Pooling
    follows Ada-KV, section 4.1; the code of SnapKV's authors can also take the mean. The newest ``window`` slots are
    excluded from pooling, whatever the scope protects. Source: SnapKV, arXiv 2404.14469.

    The newest queries of the whole text count: if the last block is shorter than the window, queries of earlier
    blocks fill it. The newest query sees all slots, each earlier one a slot less. With compact positions, a query
    has the position of its rank. If one of those tokens was evicted (no scope protects it), that is an older slot's
    position. A head with fewer slots than the window (a small budget, or a small share of an adaptive one) sums over
    as many of the newest queries as it has slots, without pooling.
    """

    window: Positive = 32
    """Queries."""
    kernel: Odd = 7
    """Slots; 1 does not pool."""

    def recent(self, chunk: int) -> int:
        return self.window

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: attention of the window's queries, max-pooled before the window."""
        scores_BHS = recent_attention(slots, self.window)
        before = max(0, scores_BHS.shape[-1] - self.window)
        if before and self.kernel > 1:
            pooled = F.max_pool1d(scores_BHS[..., :before], self.kernel, stride=1, padding=self.kernel // 2)
            scores_BHS[..., :before] = pooled
        return scores_BHS


SNAPKV: Parts = {"score": WindowAttention(), "scopes": (Window(WindowAttention.window),)}
NAMES = {"size": "window"}

register(
    "snapkv",
    "SnapKV, arXiv 2404.14469",
    SNAPKV,
    names=NAMES,
    keeps="attention of the newest 32 queries, pooled over neighbours",
)
register(
    "pyramidkv",
    "PyramidKV, arXiv 2406.02069",
    {**SNAPKV, "allocation": Pyramid()},
    names=NAMES,
    keeps="as snapkv; lower layers get more slots",
)
register(
    "ada-snapkv",
    "Ada-KV, arXiv 2407.11550",
    {**SNAPKV, "allocation": Adaptive()},
    names=NAMES,
    keeps="as snapkv; heads share a layer's slots by need",
)
register(
    "ada-pyramid",
    "Ada-KV, arXiv 2407.11550",
    {**SNAPKV, "allocation": PyramidAdaptive()},
    names=NAMES,
    keeps="as pyramidkv; heads share a layer's slots by need",
)


@part("score", "defensive")
class Defensive(Weight):
    """Worst-case attention to the slots before the newest ``window`` queries. Each query's attention, in each query
    head of a group, is averaged over ``kernel`` neighbours and scaled back to its sum. The score is the maximum of
    these, but at least its mean over the head's slots, because a slot that nobody reads now may be read later. Slots
    of the window get 0, whatever the scope protects.

    Differences from the authors' code: no product with norms of projected values (CriticalKV), which needs the
    backbone's weights, and no budget over all layers at once (Layer-DefensiveKV). Source: DefensiveKV, section 4.
    """

    window: Positive = 32
    """Queries."""
    kernel: Odd = 5
    """Slots; 1 does not pool."""
    by_query_head: ClassVar[bool] = False

    def recent(self, chunk: int) -> int:
        return self.window

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: the worst-case attention."""

        def worst(q_BQWD: Tensor, k_BHSD: Tensor, heads: slice) -> Tensor:
            p_BHGWS = attention_of_each(q_BQWD, k_BHSD, slots.softmax.of(heads))
            S = p_BHGWS.shape[-1]
            before = max(0, S - self.window)
            if not before:
                return p_BHGWS.amax((2, 3)).float()
            p_BHGWN = p_BHGWS[..., :before]
            pooled = F.avg_pool1d(p_BHGWN.flatten(0, 3)[:, None], self.kernel, stride=1, padding=self.kernel // 2)
            pooled_BHGWN = pooled.view_as(p_BHGWN)
            sums = [x.sum(-1, keepdim=True) for x in (p_BHGWN, pooled_BHGWN)]
            scaled_BHGWN = pooled_BHGWN * (sums[0] / sums[1])
            most_BHN = scaled_BHGWN.nan_to_num(0.0).amax((2, 3))  # of a query that gives all of them nothing
            return F.pad(most_BHN.maximum(most_BHN.mean(-1, keepdim=True)), (0, S - before)).float()

        return of_recent_queries(slots, self.window, worst, slots.keys())


register(
    "defensivekv",
    "DefensiveKV, arXiv 2510.13334",
    {"score": Defensive(), "scopes": (Window(Defensive.window),), "allocation": Adaptive(1.0)},
    names={"size": "window"},
    keeps="the most that any of the newest 32 queries reads; heads share a layer's slots by need",
)


def drop_residual(q_BQWD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, softmax: Softmax) -> Tensor:
    """Squared change ``[B, H, S]`` (float32) of attention's output when one slot is dropped, ``(p / (1 - p))^2 |v -
    o|^2``: sum over the ``W`` queries, mean over the group. The last query sees all slots, each earlier one a slot
    less. A query that sees a single slot counts 0, since it has no output without the slot."""
    v_BHSD, p_BHGWS = wide(v_BHSD), attention_of_each(q_BQWD, k_BHSD, softmax)
    B, H, S, _ = v_BHSD.shape
    W = q_BQWD.shape[2]
    o_BHGWD = p_BHGWS @ v_BHSD[:, :, None]
    odds_BHGWS = p_BHGWS / (1 - p_BHGWS).clamp_min(torch.finfo(p_BHGWS.dtype).eps)
    out_BHS = v_BHSD.new_zeros(B, H, S)
    for w in range(W):  # differences of all queries at once would be W times the values
        distance_BHGS = (v_BHSD[:, :, None] - o_BHGWD[..., w : w + 1, :]).square().sum(-1)
        out_BHS += (odds_BHGWS[..., w, :].square() * distance_BHGS).mean(2)
    return out_BHS.float()


@part("score", "residual")
class DropResidual(Weight):
    """Squared change of attention's output when the slot alone is dropped, ``(p / (1 - p))^2 |v - o|^2`` with attention ``p``,
    value ``v`` and output ``o``: sum over the newest ``window`` queries, mean over the query heads of a group. Changes of heads
    have one unit, so that ``allocation=adaptive`` compares them. Source: DropKV, openreview.net/forum?id=MqfNzH3TVH."""

    window: Positive = 32
    """Queries."""

    def recent(self, chunk: int) -> int:
        return self.window

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: the residual of dropping each slot."""

        def residual(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
            return drop_residual(q, k, v, slots.softmax.of(heads))

        return of_recent_queries(slots, self.window, residual, slots.keys(), slots.values())


register(
    "dropkv",
    "DropKV, openreview.net/forum?id=MqfNzH3TVH",
    {"score": DropResidual(), "scopes": (Window(DropResidual.window),)},
    names={"size": "window"},
    keeps="the change of the newest 32 queries' output without it",
)


def redundancy(k_BHSD: Tensor, valid_BHS: Tensor, threshold: float) -> Tensor:
    """Redundancy ``[B, H, S]`` of each slot within its head: softmax of the mean cosine similarity of the other slots'
    keys to its own. To each of them, the newest slot with similarity above ``threshold`` counts as dissimilar.
    Zero at padding. Source: R-KV, arXiv 2505.24133."""
    B, H, S, _ = k_BHSD.shape
    k_BHSD = wide(k_BHSD)
    unit_BHSD = k_BHSD / k_BHSD.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    row_S = torch.arange(S, device=k_BHSD.device)
    mean_BHS = k_BHSD.new_empty(B, H, S)
    for b in range(B):
        for h in range(H):  # S x S numbers of one head at a time
            like_SS = (unit_BHSD[b, h] @ unit_BHSD[b, h].mT).fill_diagonal_(0)
            newest_S1 = torch.where(like_SS > threshold, row_S, -1).amax(-1, keepdim=True)
            like_SS[row_S == newest_S1] = 0
            mean_BHS[b, h] = like_SS.sum(0) / valid_BHS[b, h].sum()
    return mean_BHS.masked_fill(~valid_BHS, float("-inf")).softmax(-1)


@part("score", "joint")
class AttentionAndRedundancy(Score):
    """``mix`` times the mean attention of the newest ``window`` queries (pooled over ``kernel`` neighbours as in
    SnapKV), minus ``1 - mix`` times the redundancy of the key. Redundancy is the softmax over the head's slots of
    the mean cosine similarity of the other keys to its own, after RoPE. Of the slots more similar to a key than
    ``threshold`` the newest does not count, so that the newest of many similar slots stays. Source: R-KV, arXiv
    2505.24133; sizes: its authors' code, where the first slot counts as dissimilar if none is similar. Attention is the
    mean over a group of query heads, as in SnapKV; there it is that of the group's largest logits."""

    window: Positive = 8
    """Queries."""
    kernel: Odd = 7
    """Slots; 1 does not pool."""
    mix: Annotated[float, Ge(0), Le(1)] = 0.1
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.5

    def recent(self, chunk: int) -> int:
        return self.window

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: window attention minus redundancy."""
        attention_BHS = WindowAttention(self.window, self.kernel).score_slots(slots) / self.window
        return self.mix * attention_BHS - (1 - self.mix) * redundancy(slots.keys(), slots.valid, self.threshold).float()


register(
    "rkv",
    "R-KV, arXiv 2505.24133",
    {"score": AttentionAndRedundancy(), "scopes": (Window(AttentionAndRedundancy.window),)},
    names={"size": "window"},
    keeps="attention of the newest 8 queries, less where other keys are alike",
)
