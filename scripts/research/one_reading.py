"""Last used 2026-11-25, for scripts/research/logs/heads.md.

Several retaining heads from one reading: a prompt is read once with full attention while every set of heads scores it, and
each then answers from the slots that it would have kept.

This is what a cache does whose chunk is the prompt: one eviction, before the prompt's last tokens. Hidden states are those of
full attention, so it measures what heads keep and not what a bounded context does to the rest of the text; and it costs one
prefill for all heads and budgets, where a bounded prefill costs one for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.releases import forward
from locret_kit.cache.bounded import BoundedCache
from locret_kit.cache.view import slots_of
from locret_kit.evals.engine.fidelity import nll_of
from locret_kit.heads import RetainingHeads
from locret_kit.policies.base import Entry, Score, TopK, Uniform
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.policy import Policy
from locret_kit.runtime.session import prefill
from locret_kit.settings import RunSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 512
"""Most tokens that are given after the eviction."""


@dataclass(frozen=True)
class Given:
    """How a continuation is taken that is given token by token."""

    heads: int | None
    """Number of the heads that chose the slots; None is full attention."""
    budget: int
    """Slots of a head, the held-back tail counted; 0 is full attention."""
    nll: float
    """Mean negative log-likelihood of a token, nats."""
    right: bool
    """Whether greedy decoding would have written the continuation."""
    agreement: float
    """Share of the tokens after which greedy decoding goes on as with full attention."""


class Everyone(Score):
    """Scores of several sets of heads, kept beside the cache: to the cache itself nothing is worth more than the rest."""

    needs_unrotated: ClassVar[bool] = True

    def __init__(self, heads: Sequence[RetainingHeads], score: Score) -> None:
        self.heads, self.score = heads, score
        self.pieces: list[list[list[Tensor]]] | None = [[[] for _ in one.layers] for one in heads]
        """``[B, H, T]`` of every piece that entered, by heads and layer; None once they were taken."""

    def score_new_tokens(self, entry: Entry) -> None:
        if self.pieces is None:
            return
        for heads, pieces in zip(self.heads, self.pieces, strict=True):
            scores_BHT = self.score.score_new_tokens(replace(entry, head=heads[entry.layer]))
            pieces[entry.layer].append(cast("Tensor", scores_BHT))

    def take(self) -> list[list[Tensor]]:
        """Scores ``[B, H, S]`` of all that entered, by heads and layer; empty in layers with a window. Nothing is scored
        after it."""
        pieces, self.pieces = self.pieces or [], None
        return [[torch.cat(layer, -1) if layer else torch.empty(0) for layer in one] for one in pieces]


@torch.inference_mode()
def given(
    model: PreTrainedModel,
    heads: Sequence[RetainingHeads],
    ids: Sequence[int],
    continuation: Sequence[int],
    budgets: Sequence[int],
    tail: int,
    policy: str = "locret",
) -> Iterator[Given]:
    """Full attention first, then every set of heads with every budget, each with a cache whose kept slots are close together.

    Args:
        heads: of the model. budgets: slots; of them ``tail`` are the prompt's last tokens, which no eviction touches.
        policy: what is kept of the rest; one that scores by retaining heads, and keeps as much in every head and layer.

    Raises:
        ValueError: a budget that has no room beside the tail, or is not below the prompt; more tokens than ``CHUNK`` after the
            eviction; a backbone whose layers all have a window; another policy.
    """
    body, rest = list(ids[: len(ids) - tail]), [*ids[len(ids) - tail :], *continuation[:-1]]
    if wrong := [budget for budget in budgets if not tail < budget < len(ids)]:
        raise ValueError(f"budget={wrong[0]} must be above tail={tail} and below the prompt's {len(ids)} tokens")
    if not continuation or len(rest) > CHUNK:
        raise ValueError(
            f"tail and continuation have {len(rest)} tokens, and must have at least one and at most {CHUNK}"
        )
    rule = parse_policy(policy)
    others = (rule.merge, rule.prefill_mask, rule.sparse, rule.reread, rule.recall)
    if not rule.needs_heads or rule.statistics or rule.allocation != Uniform() or any(others):
        raise ValueError(
            f"policy={policy!r} must score by retaining heads alone, keep as much in every head, and drop the rest"
        )
    settings = RunSettings(budget=max(budgets), chunk=CHUNK, stabilizers=0, local_len=0, positions="compact")
    everyone = Everyone(heads, rule.score)
    all_of_it = Policy("full", everyone, (), TopK(), source="", keeps_everything=True)
    cache = BoundedCache(settings, all_of_it, prompt_length=len(body) + len(rest))
    with attach(model):
        cache.bind(model)
        if all(rows.window is not None for rows in cache.bounded):
            raise ValueError("every layer of this backbone has a window: heads have no slots to keep")
        prefill(model, body, cache)
        scores = everyone.take()
        wanted_T = torch.tensor(continuation, device=model.device)
        chosen_T = None
        for i, budget in [(None, 0), *((i, budget) for i in range(len(heads)) for budget in budgets)]:
            mine = cache.fork(len(body) + len(rest))
            if i is not None:
                keep_chosen(mine, rule, scores[i], budget - tail)
            step = torch.tensor([rest], device=model.device)
            logits_TV = forward(model, step, mine, logits_to_keep=len(continuation))[0]
            mine_T = logits_TV.argmax(-1)
            chosen_T = mine_T if chosen_T is None else chosen_T
            yield Given(
                i, budget, float(nll_of(logits_TV, continuation).mean()), bool((mine_T == wanted_T).all()),
                float((mine_T == chosen_T).float().mean()),
            )  # fmt: skip


def keep_chosen(cache: BoundedCache, policy: Policy, scores: Sequence[Tensor], keep: int) -> None:
    """Keep ``keep`` slots in every head of every layer: those that the policy chooses by entry scores ``[B, H, S]``, at the last
    eviction of a prompt. A layer with a window has none to choose."""
    for layer, (rows, score_BHS) in enumerate(zip(cache.bounded, scores, strict=True)):
        if rows.window is None:
            slots = replace(slots_of(cache.context, layer, rows, keep, 0), entry_scores=score_BHS.clone())
            rows.keep(policy.choose(slots), keep)
