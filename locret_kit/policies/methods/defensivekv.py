"""DefensiveKV, arXiv 2510.13334: the most attention that any of the newest queries pays, and a prior for the rest."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from ..attention import attention_of_each, of_recent_queries
from ..base import Odd, Positive, Slots, Weight
from ..registry import Adaptive, Window, part, register


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
