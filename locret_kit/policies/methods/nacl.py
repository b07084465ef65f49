"""NaCl, arXiv 2408.03675: attention of proxy queries at the end, part of what stays drawn at random."""

import torch
from torch import Tensor

from ..attention import Weight, recent_attention
from ..base import PositiveSize, Ratio, Scope, Selection, Slots, free_share, rank_of, resolve_count
from ..registry import part, register
from .random import hashed


@part("score", "proxy")
class ProxyAttention(Weight):
    """``sum of a`` over the proxy queries: the newest ``tokens``. A question that ends the prompt is named by its length.
    Source: NaCl, section 5.1."""

    tokens: PositiveSize = 0.1
    """A number of tokens, or a fraction of the chunk (of the prompt, in the one-shot form)."""

    def recent(self, chunk: int) -> int:
        return proxy_count(self.tokens, chunk)

    def score_slots(self, slots: Slots) -> Tensor:
        return recent_attention(slots, self.recent(slots.chunk))


@part("scope", "proxies")
class Proxies(Scope):
    """The proxy tokens: the newest ``tokens``, or a fraction of the chunk. Source: NaCl, section 5.1."""

    tokens: PositiveSize = 0.1

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return proxy_count(self.tokens, chunk)

    def protects(self, slots: Slots) -> Tensor:
        return slots.newest(min(slots.keep, proxy_count(self.tokens, slots.chunk)))


@part("selection", "sampled")
class Sampled(Selection):
    """The best of each head, then ``ratio`` of its budget drawn without replacement from ``softmax(score)`` of the rest, by
    adding Gumbel noise to the scores and taking the largest. Protected slots are never among those drawn from.
    Every layer, head and eviction has its own draw. Source: NaCl, section 5.2."""

    ratio: Ratio = 0.7

    def aside(self, budget: int) -> int:
        return int(budget * self.ratio)

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: Slots
    ) -> Tensor:
        drawn_BH = free_share(budgets_BH, self.ratio, protected_BHS)
        best_BHS = rank_of(scores_BHS, protected_BHS, valid_BHS) < (budgets_BH - drawn_BH)[..., None]
        head_H1 = torch.arange(scores_BHS.shape[1], device=scores_BHS.device)[:, None]
        uniform_BHS = hashed(slots.positions.long(), slots.seed, slots.layer, head_H1, slots.seen)
        gumbel_BHS = -torch.log(-torch.log(uniform_BHS + 2**-25))
        return rank_of(scores_BHS + gumbel_BHS, protected_BHS | best_BHS, valid_BHS) < budgets_BH[..., None]


def proxy_count(tokens: int | float, chunk: int) -> int:
    """Number of the newest tokens that are proxies: at least one, at most the chunk."""
    return max(1, resolve_count(tokens, chunk))


register(
    "nacl",
    "NaCl, arXiv 2408.03675",
    {"score": ProxyAttention(), "scopes": (Proxies(),), "selection": Sampled()},
    names={"tokens": "proxies"},
)
