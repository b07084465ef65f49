"""SnapKV, arXiv 2404.14469: attention of the newest queries, pooled over neighbours."""

from torch import Tensor
from torch.nn import functional as F

from ..attention import recent_attention
from ..base import Odd, Positive, Slots, Weight
from ..registry import Parts, Window, part, register


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
