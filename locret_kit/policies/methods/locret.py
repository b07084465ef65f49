"""Locret, arXiv 2410.01805: importance predicted by retaining heads, and its forms with other scopes and allocations."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from ...cis import mean_of_next
from ..base import Count, Entry, Score, Slots
from ..registry import Adaptive, Parts, Pyramid, Sinks, Stabilizers, Window, part, register


@part("score", "cis")
@dataclass(frozen=True)
class Cis(Score):
    """Causal importance predicted by the layer's retaining head. Source: Locret, section 3.2.

    ``decay`` lowers it by n nats per token of age, as TRIM-KV's gates do (arXiv 2512.03324, where each token has its
    own factor). Only differences within a head count, so the code raises the score by the token's position once, as
    it enters.

    With ``lookahead``, a slot's score is the mean of its own and the next tokens' scores, computed once, when they
    are there. A retaining head sees one token and cannot know that a number follows. If some of the next tokens are
    still to come, or were evicted before, the mean is over the others.
    """

    decay: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Nats per token."""
    lookahead: Count = 0
    """Tokens."""
    needs_heads: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        """Scores ``[B, H, T]`` of the retaining head, plus the decay."""
        assert entry.head is not None  # needs_heads
        score_BHT = entry.head(entry.q, entry.k, entry.v, entry.linear)
        if not self.decay:
            return score_BHT
        return score_BHT + self.decay * entry.positions

    @property
    def is_head(self) -> bool:
        return type(self) is Cis and not self.decay

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``, averaged over the next ``lookahead`` tokens."""
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
    keeps="as locret, the mean of a token's score and the next three's; the newest half also survives the last eviction",
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
