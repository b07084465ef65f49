"""Locret, arXiv 2410.01805: importance predicted by retaining heads, and the forms that it combines to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from ..allocation import Adaptive, Pyramid
from ..base import Entry, Score, Slots
from ..merging import Nearest
from ..prefill_mask import Sliding
from ..registry import Parts, part, register
from ..reread import Passages
from ..scopes import Sinks, Stabilizers


@part("score", "cis")
@dataclass(frozen=True)
class Cis(Score):
    """Predicted causal importance of the layer's retaining head. Source: Locret, section 3.2.

    ``decay`` lowers it by so much with every token of age, as TRIM-KV's gates do (arXiv 2512.03324: a factor per token; there
    each token has its own). Only differences within a head count, so a token's place raises it instead, once, as it enters.
    """

    decay: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Nats per token."""
    needs_heads: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        if entry.head is None:
            raise ValueError("score=cis needs retaining heads")
        score_BHT = entry.head(entry.q, entry.k, entry.v)
        if not self.decay:
            return score_BHT
        return score_BHT + self.decay * (entry.position + torch.arange(score_BHT.shape[-1], device=score_BHT.device))

    def comparable(self, scores_BHS: Tensor, slots: Slots) -> Tensor:
        """A raw logit means nothing across heads before a softmax over the head's slots; a log-probability is one already,
        and only the order matters to an allocation, so it stays as it is."""
        if slots.target != "logit":
            return scores_BHS
        return scores_BHS.masked_fill(~slots.valid, float("-inf")).softmax(-1)

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        """A logit and a log-probability are logarithms of attention, but for a constant of the head."""
        return scores_BHS


LOCRET: Parts = {"score": Cis(), "scopes": (Stabilizers(), Sinks(0))}
NAMES = {"most": None, "n": "sinks", "decay": None}

# A parameter's place is part of what people write, so the decay comes last, and in the others by score=cis(decay=...).
LAST: Parts = {"scopes": LOCRET["scopes"], "score": LOCRET["score"]}
register(
    "locret",
    "Locret, arXiv 2410.01805",
    LAST,
    names={**NAMES, "decay": "decay"},
    keeps="the importance that its retaining head predicts",
)
register(
    "ada-locret",
    "Locret with Ada-KV's heads",
    {**LOCRET, "allocation": Adaptive()},
    names=NAMES,
    keeps="as locret; heads share a layer's slots by need",
)
register(
    "pyramid-locret",
    "Locret with PyramidKV's layers",
    {**LOCRET, "allocation": Pyramid()},
    names=NAMES,
    keeps="as locret; lower layers get more slots",
)
register(
    "merge-locret",
    "Locret, section 4.4",
    {**LOCRET, "merge": Nearest()},
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
register(
    "windowed-locret",
    "Locret with StreamingLLM's reading",
    {"score": Cis(), "scopes": (Stabilizers(Sliding.newest),), "prefill_mask": Sliding()},
    names={"most": "newest", "decay": None},
    keeps="as locret; the text reads its newest 1,024 slots alone, the question all",
)
register(
    "rereading-locret",
    "Locret, then InfiniRetri's second reading, arXiv 2502.12962",
    {**LOCRET, "reread": Passages()},
    names={"most": None, "n": None, "decay": None},
    keeps="as locret; then the passages that the question attends to are read again",
)
