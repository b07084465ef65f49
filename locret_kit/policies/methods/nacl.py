"""NaCl, arXiv 2408.03675: attention of proxy queries, part of what stays drawn at random."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ...backbones.rope import rotated_text
from .. import base
from ..attention import recent_attention
from ..registry import Sinks, part, register
from .random import hashed


@part("score", "proxy")
class ProxyAttention(base.Weight):
    """``sum of a`` over the proxy queries: the newest ``tokens``, and the ``first`` of the text where they are others. A question
    that ends the prompt is named by its length. Source: NaCl, section 5.1 and appendix A.3."""

    tokens: base.PositiveSize = 0.1
    """A number of tokens, or a fraction of the chunk (of the prompt, in the one-shot form)."""
    first: base.Count = 0
    """Tokens at the beginning of the text whose queries are proxies too, at the places that they have in the text."""

    @property
    def by_query_head(self) -> bool:  # type: ignore[override]
        """Whether all that it sums is known of a query head alone; what the first queries gave is that of groups."""
        return not self.first

    def recent(self, chunk: int) -> int:
        return proxy_count(self.tokens, chunk)

    def memory(self, seen: int) -> Mapping[str, str]:
        return {"q": "BQND?", "k": "BHND?", "given": "BHM?"} if self.first and seen else {}

    def score_new_tokens(self, entry: base.Entry) -> None:
        if not self.first or entry.position >= self.first:
            return
        for name, x in (("q", entry.q), ("k", entry.k)):
            new = x[:, :, : self.first - entry.position]
            entry.state[name] = torch.cat((entry.state[name], new), 2) if name in entry.state else new.clone()

    def score_slots(self, slots: base.Slots) -> Tensor:
        """Scores ``[B, H, S]``: attention of the recent and of the first queries."""
        scores_BHS = recent_attention(slots, self.recent(slots.chunk))
        if not self.first:
            return scores_BHS
        given_BHN = self._given(slots)
        n = given_BHN.shape[2]
        early_BHS = slots.valid & (slots.positions < n)
        at_BHS = slots.positions.long().clamp(max=max(n - 1, 0))
        return scores_BHS + given_BHN.gather(2, at_BHS).masked_fill(~early_BHS, 0) if n else scores_BHS

    def _given(self, slots: base.Slots) -> Tensor:
        """Attention ``[B, H, n]`` that the first queries gave the first tokens: no later token is seen by them. Those that are
        among the newest are left out; once none is, only the result is kept."""
        state = slots.state
        if "given" in state:
            return state["given"]
        n = min(self.first, slots.seen - self.recent(slots.chunk))
        if n <= 0 or "q" not in state:
            return slots.entry_scores[..., :0]
        q_BQND, k_BHND = (state[name][:, :, :n] for name in ("q", "k"))
        if slots.rope is not None:
            q_BQND, k_BHND = rotated_text(slots.rope, q_BQND, k_BHND)
        given_BHN = slots.attention(q_BQND, k_BHND)
        if n == self.first:
            state["given"] = given_BHN
            del state["q"], state["k"]
        return given_BHN


@part("scope", "proxies")
class Proxies(base.Scope):
    """The proxy tokens: the newest ``tokens``, or a fraction of the chunk. Source: NaCl, section 5.1."""

    tokens: base.PositiveSize = 0.1
    most: base.Size = 1.0
    """Largest number of protected slots, or their largest fraction of the budget of score and scopes."""

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return min(proxy_count(self.tokens, chunk), base.wanted_count(self.most, budget))

    def protects_newest(self, slots: base.Slots) -> int:
        return min(base.resolve_count(self.most, slots.keep), proxy_count(self.tokens, slots.chunk))


@part("selection", "sampled")
class Sampled(base.Selection):
    """The best of each head, then ``ratio`` of its budget drawn without replacement from a distribution over the rest, by
    adding Gumbel noise to its logarithm and taking the largest. Score and scopes have the rest of the budget to themselves: a
    scope's fraction is one of that. Every eviction has its own draw. Source: NaCl, section 5.2; the others than the defaults:
    its ablations, section 6.3."""

    ratio: base.Ratio = 0.7
    distribution: Literal["softmax", "uniform"] = "softmax"
    """'softmax' of the scores, or 'uniform'."""
    per: Literal["head", "layer", "all"] = "head"
    """'head': each head draws for itself. 'layer': one draw for all heads of a layer, from the softmax of their mean score.
    'all': as 'layer', with the same noise in every layer. Heads of one draw keep the same tokens, as long as they hold them."""

    def reserved_slots(self, budget: int) -> int:
        return int(budget * self.ratio)

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: base.Slots
    ) -> Tensor:
        own_BH = budgets_BH - base.share_of(budgets_BH, self.ratio)
        best_BHS = base.best_of(scores_BHS, protected_BHS, valid_BHS, own_BH, slots.backend)
        head_H1 = torch.arange(scores_BHS.shape[1], device=scores_BHS.device)[:, None]
        salts = (0 if self.per == "all" else slots.layer, head_H1 if self.per == "head" else 0)
        uniform_BHS = hashed(slots.positions.long(), slots.seed, *salts, slots.seen)
        gumbel_BHS = -torch.log(-torch.log(uniform_BHS + 2**-25))
        if self.distribution == "uniform":
            scores_BHS = torch.zeros_like(scores_BHS)
        elif self.per != "head":
            scores_BHS = mean_over_heads(scores_BHS, slots.positions, valid_BHS)
        return base.best_of(scores_BHS + gumbel_BHS, best_BHS, valid_BHS, budgets_BH, slots.backend)


def mean_over_heads(scores_BHS: Tensor, positions_BHS: Tensor, valid_BHS: Tensor) -> Tensor:
    """Each slot's score ``[B, H, S]`` replaced by the mean over the heads that hold its token."""
    text_B11 = torch.arange(len(scores_BHS), device=scores_BHS.device)[:, None, None]
    token_M = (text_B11 * 2**32 + positions_BHS.long())[valid_BHS]  # a token of each text of the batch
    _, at_M, count_N = token_M.unique(return_inverse=True, return_counts=True)
    mean_N = torch.zeros(len(count_N), dtype=scores_BHS.dtype, device=scores_BHS.device)
    mean_N = mean_N.index_add_(0, at_M, scores_BHS[valid_BHS]) / count_N
    return torch.zeros_like(scores_BHS).masked_scatter(valid_BHS, mean_N[at_M])


def proxy_count(tokens: int | float, chunk: int) -> int:
    """Number of the newest tokens that are proxies, at least one. ``chunk``: tokens that a fraction is of."""
    return max(1, base.wanted_count(tokens, chunk))


register(
    "nacl",
    "NaCl, arXiv 2408.03675",
    {"score": ProxyAttention(), "scopes": (Proxies(most=0.5), Sinks(0)), "selection": Sampled()},
    names={"tokens": "proxies", "most": "protected", "n": "sinks"},
    keeps="attention of proxy tokens at the end; a share of the budget is drawn by that score",
)
