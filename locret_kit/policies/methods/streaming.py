"""StreamingLLM, arXiv 2309.17453: the first tokens and the newest. Also recency alone, and no eviction."""

import torch
from torch import Tensor

from ..base import Entry, Score
from ..registry import part, register
from ..scopes import Sinks


@part("score", "recency")
class Recency(Score):
    """The token's position: the newest is worth most."""

    def score_new_tokens(self, entry: Entry) -> Tensor:
        B, H, T, _ = entry.k.shape
        pos_T = entry.position + torch.arange(T, device=entry.k.device)
        return pos_T.float().expand(B, H, T)


register(
    "streaming",
    "StreamingLLM, arXiv 2309.17453",
    {"score": Recency(), "scopes": (Sinks(),)},
    names={"n": "sinks"},
    keeps="being one of the first four, or new",
)
register("recency", "", {"score": Recency()}, keeps="being new")
register("full", "", {"score": Recency()}, keeps_everything=True, keeps="nothing is evicted")
