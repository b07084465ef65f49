"""Centroid memory, after IndexMem++: what is evicted lives on in a few centroids of each head, which draw attention by count."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..base import Folded, Merge, Positive, Score, Slots
from ..registry import part, register

if TYPE_CHECKING:
    from ...backbones.families import BackboneSpec


def fold_into_centroids(keys_SD: Tensor, values_SD: Tensor, tokens_S: Tensor, stay_S: Tensor, rounds: int) -> Folded:
    """Cluster the slots of one head that are evicted, and its centroids with them, by their keys (k-means).

    A centroid begins where it is, and stays in its own cluster; an evicted slot goes to the nearest centroid, of equals to the
    older one. Key and value of a centroid become the means over all tokens that its cluster stands for.

    Args:
        keys_SD: before RoPE; float32 or float64.
        tokens_S: tokens that a slot stands for, 0 for those that stay as they are.
        stay_S: bool; of those that stay, the ones with tokens are the centroids.
        rounds: times that slots are assigned and means are taken.
    """
    slots_R = (stay_S & (tokens_S > 0)).nonzero().flatten()
    leaving_E = (~stay_S).nonzero().flatten()
    own_R, weight_E = tokens_S[slots_R], tokens_S[leaving_E].to(keys_SD.dtype)[:, None]
    means_RD, total_R, into_E = keys_SD[slots_R], own_R, leaving_E.new_zeros(0)

    def sums(x_SD: Tensor) -> Tensor:
        """Over each cluster, by tokens ``[R, D]``."""
        return (own_R[:, None] * x_SD[slots_R]).index_add(0, into_E, weight_E * x_SD[leaving_E])

    for _ in range(rounds if len(slots_R) else 0):
        into_E = torch.cdist(keys_SD[leaving_E], means_RD).argmin(-1)
        total_R = own_R.index_add(0, into_E, tokens_S[leaving_E])
        means_RD = sums(keys_SD) / total_R[:, None]
    if not len(slots_R):
        return Folded(slots_R, means_RD, values_SD[slots_R], tokens_R=total_R)
    return Folded(slots_R, means_RD, sums(values_SD) / total_R[:, None], tokens_R=total_R)


@part("merge", "centroids")
class Centroids(Merge):
    """Of each head's slots, ``n`` are centroids: k-means of all that was evicted, by keys before RoPE, and the number of tokens
    that each stands for. A centroid draws attention as that many tokens at its place would: ``log`` of the number is added to its
    logits. The policy chooses among the other slots as if the head held no others, with ``n`` fewer.

    The first centroids begin with evicted slots that lie evenly over the text. Each later eviction adds what it takes to the
    nearest centroid; nothing is trained. A centroid keeps the position of the slot with which it began, and policies that look
    at attention to weigh slots see it as one key. Source: IndexMem++ (IndexMem: arXiv 2605.25475) and its code (64 centroids,
    counts as a bias); k-means over keys before RoPE, in a chunked cache and within the budget, is this project's.
    """

    n: Positive = 32
    """Centroids of a head; part of the budget."""
    rounds: Positive = 3
    """Rounds of k-means at an eviction."""

    remembers: ClassVar[bool] = False

    @property
    def aside(self) -> int:
        """The centroids."""
        return self.n

    def bind(self, spec: BackboneSpec, device: torch.device) -> None:
        """Any backbone will do."""

    def places(self, slots: Slots, stay_BHS: Tensor) -> Tensor:
        """The centroids ``[B, H, S]``: those there are, and as many evicted slots as are missing, evenly over the text."""
        assert slots.tokens is not None
        old_BHS = slots.tokens > 0
        gone_BHS = slots.valid & ~stay_BHS & ~old_BHS
        m = self.n - old_BHS.sum(-1, keepdim=True)
        E = gone_BHS.sum(-1, keepdim=True).clamp(min=1)
        # m of E ranks, evenly: those at which m r / E, rounded, rises.
        before_BHS = (gone_BHS.cumsum(-1) - 1) * m + E // 2
        return old_BHS | (gone_BHS & ((before_BHS + m) // E > before_BHS // E))

    def told(self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor) -> Tensor:
        """Tokens that each slot stands for (float32), 0 where it stays as it is."""
        assert slots.tokens is not None
        return slots.tokens.clamp(min=1).where(~stay_BHS | (slots.tokens > 0), 0).float()

    def fold(self, layer: int, keys_SD: Tensor, values_SD: Tensor, told_S: Tensor, stay_S: Tensor) -> Folded:
        """One head's centroids."""
        return fold_into_centroids(keys_SD, values_SD, told_S.to(keys_SD.dtype), stay_S, self.rounds)


register(
    "centroids",
    "{base} with centroid memory, after IndexMem++, arXiv 2605.25475",
    {"merge": Centroids()},
    base="locret",
    keeps="as locret; evicted slots live on in 32 centroids of each head, which draw attention by their number of tokens",
)
