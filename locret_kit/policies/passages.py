"""Two-pass reading: the passages of the text that the kept slots point to are read again before the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import recent_attention
from .base import Reread, Slots
from .parameters import Count, Odd, Positive, Ratio
from .registry import part


@part("reread", "passages")
class Passages(Reread):
    """The tail of the prompt, which is held back, is read over every slot; then the cache is emptied, and the ``tokens`` of
    the text that the tail asked for are read once more, and the tail after them: kept slots are an index to the text.

    A token's score is its share of the attention of the newest ``window`` queries among the older slots of a head, with
    ``each`` of any one of these queries, the most that any head of any layer gives it; then the mean over ``smooth``
    neighbouring tokens, zero where none is, and the maximum over ``kernel`` of these. A single token that one head looks at
    says little; a passage that heads look at token after token says more. Which query knows what is asked for depends on the
    prompt: its last one after the answer's first words, that of the question's last word where a chat template's follow. With
    ``least``, what scores less than so much of the best is not read again even where there is room: other passages distract
    a small model. The ``first`` tokens (a
    template's head, an instruction, the sinks of attention) do not count among the slots, and are read again in any case.
    What is read again stands side by side, and nothing is evicted from it, so the answer does not come through a context with
    gaps; what was not asked for is gone. A prompt that fits the budget is read once.

    Source: to read again what attention points to, from token ids, is InfiniRetri's (arXiv 2502.12962; last layer,
    sentences); from the slots that a policy keeps, and by the most of all heads, is this project's
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
        """Raise the scores of a text's tokens ``[P]``, in place, to what the heads of a layer give them; ``size`` of them are
        to be read again."""
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
