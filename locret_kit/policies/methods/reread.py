"""Two-pass reading: the passages of the text that the kept slots point to are read again before the answer."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import recent_attention
from ..base import Count, Odd, Positive, Ratio, Reread, Slots
from ..registry import part, register
from .locret import AVERAGED, NAMES, SCOPES, SCORE


@part("reread", "passages")
class Passages(Reread):
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

    tokens: Positive = 512
    """Tokens of the text that are read again, at most half of the smallest layer's budget."""
    window: Positive = 32
    """Queries; all of the tail's where it has fewer."""
    kernel: Odd = 33
    """Tokens; 1 does not pool."""
    first: Count = 32
    """Tokens, at most half of those that are read again."""
    smooth: Odd = 1
    """Tokens; 1 averages nothing."""
    each: bool = False
    """Whether each of the queries counts by itself, and not their sum."""
    least: Ratio = 0.0
    """Share of the best token's score."""

    def size(self, budget: int, tail: int) -> int:
        """Tokens that are read before the ``tail``, at least one."""
        return max(1, min(self.tokens, budget // 2, budget - tail))

    def collect(self, score_P: Tensor, slots: Slots, tail: int, size: int) -> None:
        """Raise the scores of a text's tokens ``[P]``, in place, to those given by the heads of a layer. ``size``:
        number of tokens to read again."""
        text_BHS = slots.valid & (slots.positions >= self._opening(size)) & (slots.positions < len(score_P))
        at_BHS = slots.positions.long().masked_fill(~text_BHS, 0)
        window = min(self.window, tail)
        slots = replace(slots, queries=cache(slots.queries), keys=cache(slots.keys))  # rotated once for all queries
        for newest, but in [(i + 1, i) for i in range(window)] if self.each else [(window, 0)]:
            asked_BHS = recent_attention(slots, newest, but).masked_fill(~text_BHS, 0)
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
