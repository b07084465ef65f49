"""InfLLM, arXiv 2402.04617: the first tokens, a local window, and recalled blocks of everything else.

As published and in its code (``inf_llm/attention/context_manager.py`` of thunlp/InfLLM): the first tokens; a window
of ``far`` tokens; and blocks of 128 tokens of the text between both, in host memory. Slots further away than the
window get its RoPE distance. A block's representatives are the 4 tokens with the most attention from within the
window, per query head; their mean is its key. The mean of the queries read together selects the best 16 blocks for
all heads of a layer. As published: a budget of 4224 (128 and 4096), ``chunk=512``, ``decode_every=128``, positions
``compact``.

Differences: tokens that leave the window wait for the next eviction, after a chunk. The block cut by the prompt's
last eviction is stored with its evicted part.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..base import BlockIndex, Positive, Recall, Slots, wide
from ..registry import Sinks, part, register
from .streaming import Recency

PUBLISHED = 4224
"""Slots of a head: 128 first tokens, and a window of 4096."""


@part("recall", "infllm")
class Infllm(Recall):
    """Blocks found by the mean of their queries, for a whole layer."""

    size: Positive = 128
    """Tokens of a block."""
    take: Positive = 16
    """Blocks that come back."""
    representatives: Positive = 4
    """Tokens per block and query head whose mean key finds it."""
    far: Positive = 4096
    """Distance (tokens) at which all slots stand that are further away: the local window."""
    statistics: ClassVar[frozenset[str]] = frozenset({"sum"})
    by_query_head: ClassVar[bool] = True
    apart = 0
    reading = True
    local = 0
    across = "layer"

    def shortfall(self, budget: int) -> str:
        return f"places {self.far} slots as in the text" if budget < self.far else ""

    def views(self, slots: Slots, scores_BHS: Tensor) -> Sequence[Tensor]:
        return [one.stats["sum"] for one in slots.group]

    def relevance(self, q_BQTD: Tensor, index: BlockIndex) -> Tensor:
        B, H, _, _, D = index.index_BHNRD.shape
        there_BHNGR = index.there_BHNR.unflatten(-1, (-1, self.representatives))
        keys_BHNGRD = wide(index.index_BHNRD).unflatten(3, (-1, self.representatives))
        total_BHNGD = keys_BHNGRD.masked_fill(~there_BHNGR[..., None], 0).sum(-2)
        key_BHNGD = total_BHNGD / there_BHNGR.sum(-1).clamp(min=1)[..., None]
        q_BHGD = wide(q_BQTD).mean(2).view(B, H, -1, D)
        return (key_BHNGD * q_BHGD[:, :, None]).sum((1, 3, 4))[:, None]


@part("recall", "scaled-infllm")
class ScaledInfllm(Infllm):
    """InfLLM for any budget: at 4224 slots the sizes are as they are given. At another number the window, and the rows that come
    back, are in proportion to it; half of that is in the size of blocks, half in their number. The scaling is this project's."""

    def at(self, budget: int) -> Infllm:
        share = budget / PUBLISHED
        size, take = (max(1, round(n * share**0.5)) for n in (self.size, self.take))
        return Infllm(size, take, min(self.representatives, size), max(1, round(self.far * share)))

    def shortfall(self, budget: int) -> str:
        return ""


NAMES = {"n": "init", "far": "local"}
SOURCE = "InfLLM, arXiv 2402.04617"
register(
    "infllm",
    f"{SOURCE}: with a budget of {PUBLISHED}",
    {"score": Recency(), "scopes": (Sinks(128),), "recall": Infllm()},
    names=NAMES,
    keeps="its place among the first 128 tokens or the newest; blocks of the others are recalled",
)
register(
    "scaled-infllm",
    f"{SOURCE}, in proportion to the budget",
    {"score": Recency(), "scopes": (Sinks(128 / PUBLISHED),), "recall": ScaledInfllm()},
    names=NAMES,
    keeps="as infllm, in proportion to the budget",
)
