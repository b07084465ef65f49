"""R-KV, arXiv 2505.24133: attention of the newest queries, less what other keys say too."""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from ..base import Odd, Positive, Score, Slots, wide
from ..registry import Window, part, register
from .snapkv import WindowAttention


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
