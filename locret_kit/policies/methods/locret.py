"""Locret, arXiv 2410.01805: importance predicted by retaining heads, and the forms that it combines to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from ...cis import mean_of_next
from ..allocation import Adaptive, Pyramid
from ..base import Entry, Score, Slots
from ..merging import Nearest
from ..parameters import Count
from ..passages import Passages
from ..prefill_mask import Sliding
from ..registry import Parts, part, register
from ..scopes import Sinks, Stabilizers, Window


@part("score", "cis")
@dataclass(frozen=True)
class Cis(Score):
    """Predicted causal importance of the layer's retaining head. Source: Locret, section 3.2.

    ``decay`` lowers it by so much with every token of age, as TRIM-KV's gates do (arXiv 2512.03324: a factor per token; there
    each token has its own). Only differences within a head count, so a token's place raises it instead, once, as it enters.

    With ``lookahead``, a slot's score is the mean of its own and those of the next tokens, computed once, when they are there: a
    retaining head sees one token, and cannot know that a number follows. Of those whose next tokens are yet to come, and of
    those whose next tokens were evicted before they came to be averaged, what is there counts.
    """

    decay: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Nats per token."""
    lookahead: Count = 0
    """Tokens."""
    needs_heads: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        if entry.head is None:
            raise ValueError("score=cis needs retaining heads")
        score_BHT = entry.head(entry.q, entry.k, entry.v, entry.linear)
        if not self.decay:
            return score_BHT
        return score_BHT + self.decay * entry.positions

    def score_slots(self, slots: Slots) -> Tensor:
        if not self.lookahead:
            return slots.entry_scores
        # Slots that stood here at the last eviction have their mean already, but for the newest of them.
        S = slots.positions.shape[-1]
        new = slice(S - min(S, slots.since_eviction + self.lookahead), None)
        place_BHN, own_BHN = slots.positions[..., new], slots.entry_scores[..., new]
        due_BHN = place_BHN >= slots.seen - slots.since_eviction - self.lookahead
        mean_BHN = torch.where(due_BHN, mean_of_next(own_BHN, place_BHN, self.lookahead), own_BHN)
        scores_BHS = slots.entry_scores.clone()
        scores_BHS[..., new] = mean_BHN
        slots.entry_scores[..., new] = torch.where(place_BHN < slots.seen - self.lookahead, mean_BHN, own_BHN)
        return scores_BHS

    def comparable(self, scores_BHS: Tensor, slots: Slots) -> Tensor:
        """A raw logit means nothing across heads before a softmax over the head's slots; a log-probability is one already,
        and only the order matters to an allocation, so it stays as it is."""
        if slots.target != "logit":
            return scores_BHS
        return scores_BHS.masked_fill(~slots.valid, float("-inf")).softmax(-1)

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        """A logit and a log-probability are logarithms of attention, but for a constant of the head."""
        return scores_BHS


# A parameter's place is part of what people write, so those of the score come last.
SCOPES: Parts = {"scopes": (Stabilizers(), Sinks(0))}
SCORE: Parts = {"score": Cis()}
AVERAGED: Parts = {"scopes": (Stabilizers(), Sinks(0), Window(0.5)), "score": Cis(lookahead=3)}
NAMES = {"most": None, "n": "sinks"}

register(
    "locret",
    "Locret, arXiv 2410.01805",
    {**SCOPES, **SCORE},
    names=NAMES,
    keeps="the importance that its retaining head predicts",
)
register(
    "lookahead-locret",
    "Locret with scores that are averaged, and its newest slots kept to the end",
    AVERAGED,
    names={**NAMES, "size": "newest"},
    keeps="as locret, averaged with that of the next 3 tokens; the newest half stays at the last eviction too",
)
register(
    "ada-locret",
    "Locret with Ada-KV's heads",
    {**SCOPES, "allocation": Adaptive(), **SCORE},
    names=NAMES,
    keeps="as locret; heads share a layer's slots by need",
)
register(
    "pyramid-locret",
    "Locret with PyramidKV's layers",
    {**SCOPES, "allocation": Pyramid(), **SCORE},
    names=NAMES,
    keeps="as locret; lower layers get more slots",
)
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
register(
    "windowed-locret",
    "Locret with StreamingLLM's reading",
    {"scopes": (Stabilizers(Sliding.newest),), "prefill_mask": Sliding(), **SCORE},
    names={"most": "newest"},
    keeps="as locret; the text reads its newest 1,024 slots alone, the question all",
)
register(
    "rereading-locret",
    "Locret, then InfiniRetri's second reading, arXiv 2502.12962",
    {**SCOPES, "reread": Passages(), **SCORE},
    names={**NAMES, "n": None},
    keeps="as locret; then the passages that the question attends to are read again",
)
register(
    "rereading-lookahead-locret",
    "Locret with scores that are averaged, then InfiniRetri's second reading, arXiv 2502.12962",
    {**AVERAGED, "reread": Passages(window=12, smooth=13, each=True, least=0.4)},
    names={**NAMES, "n": None, "size": "newest"},
    keeps="as lookahead-locret; then the passages that the question's end attends to are read again",
)
