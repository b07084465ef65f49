"""Locret, arXiv 2410.01805: importance predicted by retaining heads, and the forms that it combines to with merging, two-pass
reading and a prefill mask."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn import functional as F

from ...cis import mean_of_next
from .. import base
from ..registry import Adaptive, Parts, Pyramid, Sinks, Stabilizers, Window, part, register

# ---- merging --------------------------------------------------------------------------------------------------------

# Evicted slots are folded into slots of the same head that stay.
#
# ``Nearest`` folds each into the slot that is nearest to it; ``Lococo`` (``methods/lococo.py``) folds all of them into the pool,
# the slots of lowest score that stay, by a trained convolution.
#
# With ``Nearest``, a slot's key and value are the weighted means of those of the tokens folded into it. Keys are compared and
# averaged **before RoPE**: what a kept slot stands for is content, and its position stays its own. Averages of keys rotated for
# different positions would cancel in the fast dimensions. Values know no position and take the same weights.
#
# A token weighs what its score says of the attention it draws (``Score.log_weight``), or the same as every other token. What
# a slot has taken over is remembered beside it, so a later fold is a mean over all tokens again and the weights of a head sum
# to the same before and after. Position, entry score and running statistics of a slot stay those of its own token. Pinned
# slots take nothing over: they are the text as it was read.
#
# To attention a merged slot is one key, not several: it draws what its mean key draws.
# Source: the training-free baseline of attention pools, as Locret 4.4 combines eviction with LoCoCo (arXiv 2406.05317).
#
# A merger is asked for facts about a layer's slots once (``facts [B, H, S]``), and then folds one head after the other;
# ``remembers`` says whether a slot carries the weight that it took over.


Metric = Literal["cosine", "l2"]
TILE = 2**20
"""Similarities of evicted and kept keys that exist at once."""


def nearest_kept(keys_SD: Tensor, stay_S: Tensor, metric: Metric = "cosine", tile: int = TILE) -> Tensor:
    """The kept slot ``[E]`` (int64) whose key is nearest to that of each evicted slot, in the order of the evicted; ties go
    to the newer one. At least one slot stays; at most ``tile`` similarities exist at once, or one row of them."""
    newest_first_K = stay_S.nonzero().flatten().flip(0)
    leaving_ED, kept_KD = keys_SD[~stay_S], keys_SD[newest_first_K]
    # A key's own length changes nothing about which of the others is nearest.
    if metric == "cosine":
        kept_KD, handicap_K = F.normalize(kept_KD, dim=-1), kept_KD.new_zeros(())
    else:
        handicap_K = kept_KD.square().sum(-1) / 2
    pieces = leaving_ED.split(max(1, tile // len(kept_KD)))
    return newest_first_K[torch.cat([(piece @ kept_KD.T - handicap_K).argmax(-1) for piece in pieces])]


def fold_nearest(
    keys_SD: Tensor, values_SD: Tensor, log_weight_S: Tensor, stay_S: Tensor, metric: Metric = "cosine"
) -> base.Folded:
    """Fold every evicted slot of one head into the nearest that stays, by weighted means.

    Args:
        keys_SD: before RoPE; float32 or float64.
        values_SD: of the same dtype; the size of a value may differ from that of a key.
        log_weight_S: finite logarithms of the slots' weights, in any common unit.
        stay_S: bool. Where none stays there is nothing to fold into, and all are dropped.
    """
    if not stay_S.any() or stay_S.all():
        none_R = stay_S.new_empty(0, dtype=torch.int64)
        return base.Folded(none_R, keys_SD[none_R], values_SD[none_R], log_weight_S[none_R])
    leaving_E = (~stay_S).nonzero().flatten()
    slots_R, into_E = nearest_kept(keys_SD, stay_S, metric).unique(return_inverse=True)
    own_R, other_E = log_weight_S[slots_R], log_weight_S[leaving_E]
    top_R = own_R.scatter_reduce(0, into_E, other_E, "amax")  # weights are relative to the largest of a fold
    own_R, other_E = (own_R - top_R).exp(), (other_E - top_R[into_E]).exp()
    weight_R = torch.zeros_like(own_R).index_add(0, into_E, other_E)

    def mean(x_SD: Tensor) -> Tensor:
        total_RD = (own_R[:, None] * x_SD[slots_R]).index_add(0, into_E, other_E[:, None] * x_SD[leaving_E])
        return total_RD / (own_R + weight_R)[:, None]

    return base.Folded(slots_R, mean(keys_SD), mean(values_SD), top_R + weight_R.log())


@part("merge", "nearest")
class Nearest(base.Merge):
    """Every evicted slot is folded into the kept slot of its head whose key, before RoPE, is nearest to its own."""

    metric: Metric = "cosine"
    """'cosine' or 'l2'."""
    weight: Literal["score", "count"] = "score"
    """'score' or 'count': whether a token weighs what its score says, or as much as every other."""

    remembers: ClassVar[bool] = True

    def facts(
        self, score: base.Score, slots: base.Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor
    ) -> Tensor:
        """Logarithm of what each slot's own token weighs ``[B, H, S]`` (float32), by the policy's score."""
        if self.weight == "count":
            return torch.zeros_like(scores_BHS, dtype=torch.float32)
        return score.log_weight(scores_BHS).float()

    def fold(self, layer: int, keys_SD: Tensor, values_SD: Tensor, facts_S: Tensor, stay_S: Tensor) -> base.Folded:
        """One head's slots that take others over."""
        return fold_nearest(keys_SD, values_SD, facts_S, stay_S, self.metric)


# ---- two-pass reading -----------------------------------------------------------------------------------------------

# The passages of the text that the kept slots point to are read again before the answer.


@part("reread", "passages")
class Passages(base.Reread):
    """Reading in two passes. The held-back tail of the prompt is read over every slot. Then the cache is emptied,
    the ``tokens`` of the text that the tail attended to are read again, and the tail after them. The kept slots
    serve as an index to the text.

    A token's score is its share of the attention of the newest ``window`` queries among the older slots of a head;
    with ``each``, that of the single best query. The maximum over all heads and layers counts. Scores are then
    averaged over ``smooth`` neighbouring tokens (zero outside the text), and the maximum over ``kernel`` of these is
    taken. A single token that one head attends to says little; a passage that gets attention token after token says
    more. Which query knows the question depends on the prompt: its last query after the answer's first words, or the
    query of the question's last word if a chat template follows. With ``least``, tokens below this share of the best
    score are not read again even if there is room, because other passages distract a small model. The ``first``
    tokens (a template's head, an instruction, attention sinks) do not count among the slots and are always read
    again. Tokens read again are contiguous and nothing is evicted from them, so the answer has a context without
    gaps; the rest of the text is gone. A prompt that fits the budget is read once.

    Source: rereading by attention, from token ids, is InfiniRetri's (arXiv 2502.12962; last layer, sentences). Using
    a policy's kept slots and the maximum over all heads is this project's
    (``checkpoints/smollm2-135m-locret/LOG.md``).
    """

    tokens: base.Positive = 512
    """Tokens of the text that are read again, at most half of the smallest layer's budget."""
    window: base.Positive = 32
    """Queries; all of the tail's where it has fewer."""
    kernel: base.Odd = 33
    """Tokens; 1 does not pool."""
    first: base.Count = 32
    """Tokens, at most half of those that are read again."""
    smooth: base.Odd = 1
    """Tokens; 1 averages nothing."""
    each: bool = False
    """Whether each of the queries counts by itself, and not their sum."""
    least: base.Ratio = 0.0
    """Share of the best token's score."""

    def size(self, budget: int, tail: int) -> int:
        """Tokens that are read before the ``tail``, at least one."""
        return max(1, min(self.tokens, budget // 2, budget - tail))

    def collect(self, score_P: Tensor, slots: base.Slots, tail: int, size: int) -> None:
        """Raise the scores of a text's tokens ``[P]``, in place, to those given by the heads of a layer. ``size``:
        number of tokens to read again."""
        text_BHS = slots.valid & (slots.positions >= self._opening(size)) & (slots.positions < len(score_P))
        at_BHS = slots.positions.long().masked_fill(~text_BHS, 0)
        window = min(self.window, tail)
        slots = replace(slots, queries=cache(slots.queries), keys=cache(slots.keys))  # rotated once for all queries
        for newest, but in [(i + 1, i) for i in range(window)] if self.each else [(window, 0)]:
            asked_BHS = base.recent_attention(slots, newest, but).masked_fill(~text_BHS, 0)
            share_BHS = asked_BHS / asked_BHS.sum(-1, keepdim=True).clamp(min=torch.finfo(asked_BHS.dtype).tiny)
            score_P.scatter_reduce_(0, at_BHS.flatten(), share_BHS.flatten().to(score_P.dtype), "amax")

    def choose(self, score_P: Tensor, size: int) -> Tensor:
        """The tokens, at most ``size``, ascending; of those that are worth the same the earlier ones."""
        mean_P = F.avg_pool1d(score_P[None, None], self.smooth, stride=1, padding=self.smooth // 2)
        pooled_P = F.max_pool1d(mean_P, self.kernel, stride=1, padding=self.kernel // 2)[0, 0]
        opening = self._opening(size)
        enough_P = pooled_P >= self.least * pooled_P[opening:].amax()
        pooled_P[:opening], enough_P[:opening] = float("inf"), True
        chosen = pooled_P.argsort(descending=True, stable=True)[:size]
        return chosen[enough_P[chosen]].sort().values

    def _opening(self, size: int) -> int:
        return min(self.first, size // 2)


# ---- slots that a token of the prompt attends to while the prompt is read -------------------------------------------

# The prompt's tail and decoded tokens attend to all.


@part("prefill_mask", "sliding")
class Sliding(base.PrefillMask):
    """Mask of tokens after the first eviction: a token sees the first ``sinks`` slots of its head, the ``newest`` slots kept
    at the last eviction, and all tokens read since. The other slots wait for the question.

    Backbones are not trained on contexts with gaps. New tokens read in one get worse keys and values, which shows
    when the question needs them. Source: sinks and a window are StreamingLLM's, arXiv 2309.17453. Keeping slots that
    later text does not see is this project's (``checkpoints/smollm2-135m-locret/LOG.md``).
    """

    newest: base.Count = 1024
    sinks: base.Count = 8

    def visible(self, rows: int, fresh: int) -> tuple[slice, slice] | None:
        """The row ranges that a token sees, out of a head's ``rows``; ``fresh`` of them entered since the last
        eviction. None for all."""
        hidden_until = rows - fresh - self.newest
        return (slice(0, self.sinks), slice(hidden_until, rows)) if hidden_until > self.sinks else None


# ---- locret, arXiv 2410.01805 ----


@part("score", "cis")
@dataclass(frozen=True)
class Cis(base.Score):
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
    lookahead: base.Count = 0
    """Tokens."""
    needs_heads: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: base.Entry) -> Tensor:
        """Scores ``[B, H, T]`` of the retaining head, plus the decay.

        Raises:
            ValueError: no retaining heads.
        """
        if entry.head is None:
            raise ValueError("score=cis needs retaining heads")
        score_BHT = entry.head(entry.q, entry.k, entry.v, entry.linear)
        if not self.decay:
            return score_BHT
        return score_BHT + self.decay * entry.positions

    @property
    def is_head(self) -> bool:
        return type(self) is Cis and not self.decay

    def score_slots(self, slots: base.Slots) -> Tensor:
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

    def comparable(self, scores_BHS: Tensor, slots: base.Slots) -> Tensor:
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
    keeps="as locret; tokens of the text attend to the newest 1,024 slots, the question to all",
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
