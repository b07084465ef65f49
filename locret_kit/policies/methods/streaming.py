"""StreamingLLM, arXiv 2309.17453: the first tokens and the newest. Also recency alone, and no eviction."""

from typing import ClassVar

from torch import Tensor

from ..base import Entry, Score
from ..registry import Sinks, part, register


@part("score", "recency")
class Recency(Score):
    """The token's position: the newest is worth most."""

    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        return entry.positions.float().expand(entry.k.shape[:3])


register(
    "streaming",
    "StreamingLLM, arXiv 2309.17453",
    {"score": Recency(), "scopes": (Sinks(),)},
    names={"n": "sinks"},
    keeps="its place among the first four tokens or the newest",
)
register("recency", "", {"score": Recency()}, keeps="its place among the newest")
register("full", "", {"score": Recency()}, keeps_everything=True, keeps="nothing is evicted")
