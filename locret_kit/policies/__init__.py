"""Eviction policies. A policy: its parts under one name, which go together or are refused, and the slots that they choose.

The parts are in ``base``, their names in ``registry``, and the grammar that composes them in ``grammar``.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial, reduce
from math import floor
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.backend import function

from . import base
from .slots import joined

H = TypeVar("H")

# Whole numbers of slots from shares: sums are exact, whatever is rounded.

WHOLE = 10**6
"""Unit of shares on the device: 1 / ``WHOLE`` of a slot."""


def rounded(shares: list[Fraction], total: int) -> list[int]:
    """Integers near ``shares`` whose sum is ``total``: each rounded down, then one more for the largest fractions (of equals,
    the first). The sum of the shares is less than ``total + 1``, and at least ``total``.

    >>> rounded([Fraction(5, 2), Fraction(5, 2), Fraction(1)], 6)
    [3, 2, 1]
    """
    out = [floor(share) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: out[i] - shares[i])
    for i in by_fraction[: total - sum(out)]:
        out[i] += 1
    return out


def rounded_on_device(share_BH: Tensor, most_BH: Tensor, total: int | Tensor) -> Tensor:
    """``rounded`` for every row ``[B, H]`` (int64) without a wait of the host. Shares are in units of 1 / ``WHOLE``.
    None is above ``most``; a row sums to ``total`` (an integer, or ``[B]``), or to that of ``most`` if it is less."""
    H = share_BH.shape[1]
    down_BH = (share_BH // WHOLE).minimum(most_BH)
    turn_BH = (share_BH - WHOLE * down_BH).argsort(dim=-1, descending=True, stable=True)
    room_BH = (most_BH - down_BH).gather(1, turn_BH)
    missing_B1 = (most_BH.sum(-1).clamp(max=total) - down_BH.sum(-1))[:, None]
    # In a round every head that has room gets one. How many are given until k heads are full, and the last such k:
    low_BK = F.pad(room_BH.sort(dim=-1).values, (1, 0))
    left_K = torch.arange(H, -1, -1, device=share_BH.device)
    given_BK = low_BK.cumsum(-1) + left_K * low_BK
    k_B1 = (given_BK <= missing_B1).sum(-1, keepdim=True) - 1
    rounds_B1 = low_BK.gather(1, k_B1) + (missing_B1 - given_BK.gather(1, k_B1)) // left_K[k_B1].clamp(min=1)
    more_BH = room_BH.minimum(rounds_B1)
    open_BH = room_BH > rounds_B1
    more_BH = more_BH + (open_BH & (open_BH.cumsum(-1) <= missing_B1 - more_BH.sum(-1, keepdim=True)))
    return down_BH.scatter_add(1, turn_BH, more_BH)


def raised(budgets_BH: Tensor, least_BH: Tensor) -> Tensor:
    """Budgets ``[B, H]`` (int64) raised to at least ``least``, with the same sum per row. Each row's sum must be at
    least that of ``least``. The other heads give slots in proportion to their surplus."""
    spare_BH = (budgets_BH - least_BH).clamp(min=0)
    total_B, spare_B1 = (budgets_BH - least_BH).sum(-1), spare_BH.sum(-1, keepdim=True).clamp(min=1)
    # Whole slots and the rest apart: all three factors together would leave 64 bits at 32 heads of 500,000 slots.
    whole_BH, rest_BH = spare_BH * total_B[:, None] // spare_B1, spare_BH * total_B[:, None] % spare_B1
    return least_BH + rounded_on_device(whole_BH * WHOLE + rest_BH * WHOLE // spare_B1, spare_BH, total_B)


EVIDENCE = "sum"
"""The statistic of ``Policy.evidence``."""


@dataclass(frozen=True)
class Policy:
    """The parts of a policy under one name."""

    name: str
    score: base.Score
    scopes: tuple[base.Scope, ...] = ()
    selection: base.Selection = field(default_factory=base.TopK)
    allocation: base.Allocation = field(default_factory=base.Uniform)
    source: str = ""
    keeps_everything: bool = False
    merge: base.Merge | None = None
    """None drops evicted slots."""
    prefill_mask: base.PrefillMask | None = None
    """None: a token of the prompt sees every slot."""
    sparse: base.Sparse | None = None
    """None: a token of the prompt attends to all that it sees."""
    recall: base.Recall | None = None
    """None: evicted slots are not stored."""
    reread: base.Reread | None = None
    """None: the prompt's end is read once and sees every slot."""
    evidence: bool = False
    """Whether slots sum up the attention that they receive, although no part may read it: passages are found by it."""

    def __post_init__(self) -> None:
        """Raise ValueError where parts do not go together. Sparse prefill skips attention that others need. Besides recall, an
        evicted slot is not merged, and no other part decides which slots a token sees."""
        said = f"policy={self.name!r}: sparse prefill"
        if self.sparse is not None and (summed := sorted(self.statistics - {"count"})):
            raise ValueError(
                f"{said} leaves attention out, and score or scope read of all of it: {', '.join(summed)}; "
                "choose others, such as score=cis or score=window"
            )
        if self.sparse is not None and self.prefill_mask is not None:
            raise ValueError(f"{said} chooses what a token attends to, and so does prefill_mask: leave one out")
        for name in ("merge", "prefill_mask", "sparse", "reread") if self.recall is not None else ():
            if getattr(self, name) is not None:
                merged, chosen = "an evicted slot is merged or stored", "both choose what a token attends to"
                why = merged if name == "merge" else chosen
                raise ValueError(f"policy={self.name!r}: recall does not go with {name}, since {why}: leave one out")

    @property
    def needs_heads(self) -> bool:
        """Whether retaining heads are needed."""
        return self.score.needs_heads

    def heads_for(self, heads: H | None, give: str = "pass heads=") -> H | None:
        """The retaining heads that the policy scores with; None if it needs none. Raises ValueError if it needs some
        but has none; ``give`` says how to pass them."""
        if self.needs_heads and heads is None:
            raise ValueError(f"policy={self.name!r} scores with retaining heads: {give}")
        return heads if self.needs_heads else None

    @property
    def needs_unrotated(self) -> bool:
        """Whether queries and keys before RoPE are needed, as retaining heads and mergers need them too."""
        far = self.recall is not None and self.recall.far > 0
        return self.score.needs_unrotated or self.score.needs_heads or self.merge is not None or far

    @property
    def statistics(self) -> frozenset[str]:
        """Running statistics that the parts read, and that of ``evidence``."""
        recall = frozenset() if self.recall is None else self.recall.statistics
        own = {EVIDENCE} if self.evidence else frozenset()
        return self.score.statistics.union(recall, own, *(scope.statistics for scope in self.scopes))

    @property
    def by_query_head(self) -> bool:
        """Whether running statistics are kept per query head, in addition to those of groups."""
        recall = self.recall is not None and self.recall.by_query_head
        return recall or (self.selection.by_query_head and self.score.by_query_head)

    @property
    def ragged(self) -> bool:
        """Whether heads of one layer may hold different numbers of slots."""
        return self.allocation.layout != "equal"

    def at(self, budget: int) -> Self:
        """The policy with its recall sized for a budget of n slots per head."""
        return self if self.recall is None else replace(self, recall=self.recall.at(budget))

    def watched(self) -> Self:
        """The policy with ``evidence``; itself where sparse prefill leaves attention out."""
        return self if self.sparse is not None else replace(self, evidence=True)

    def recent(self, chunk: int) -> int:
        """Number of the newest queries that must be kept at hand."""
        return max(self.score.recent(chunk), self.reread.window if self.reread is not None else 0)

    def layer_budgets(
        self, budget: int, layers: int, chunk: int, stabilizers: int, tail: int = 0, longest: int | None = None
    ) -> list[int]:
        """Slots per head of each layer. ``tail``: number of tokens that are never evicted; every layer must have
        room for them.

        Warns (``PolicyWarning``) if the budget has too little room for the parts.
        """
        own = budget - self.selection.reserved_slots(budget)
        said = f"policy={self.name!r} at a budget of {budget} slots:"
        left = f", of which {self.selection} leaves {own}" if own < budget else ""
        for scope in self.scopes:
            if (asked := scope.reserved(own, chunk, stabilizers)) > own:
                short = f"{scope} asks for {asked} slots{left}; the score chooses none"
                warnings.warn(f"{said} {short}", base.PolicyWarning, 2)
        for part in (self.selection, self.recall):
            if part is not None and (shortfall := part.shortfall(budget)):
                warnings.warn(f"{said} {part} {shortfall}", base.PolicyWarning, 2)
        window = max((scope.window(own, chunk, stabilizers) for scope in self.scopes), default=0)
        return self.allocation.layer_budgets(budget, layers, min(max(window, tail + 1), budget), longest)

    def protected(self, slots: base.Slots) -> Tensor:
        """Boolean ``[B, H, S]``: the slots that are pinned, or protected by a scope. Fractions refer to the slots
        that the selection leaves to score and scopes."""
        own = replace(slots, keep=slots.keep - self.selection.reserved_slots(slots.keep))
        masks = [] if slots.pinned is None else [slots.pinned]
        masks += [scope.protects(own) for scope in self.scopes if not scope.idle]
        return reduce(torch.logical_or, masks) if masks else torch.zeros_like(slots.valid)

    def query_head_votes(self, slots: base.Slots, scores_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor) -> Tensor:
        """Boolean ``[B, H, G, S]``: the ``budgets`` slots of ``valid`` that score and scopes would keep in each
        query head on its own. A score without attention gives equal results for all query heads of a group."""
        kept = []
        for one in slots.group or (slots,):
            scores = self.score.score_slots(one) if slots.group and self.score.by_query_head else scores_BHS
            kept_BHS = base.best_of(scores, self.protected(one) & valid_BHS, valid_BHS, budgets_BH, slots.backend)
            kept.append(kept_BHS & valid_BHS)
        return torch.stack(kept, dim=2)

    def scores(self, slots: base.Slots) -> Tensor:
        """Scores ``[B, H, S]`` of the slots. Raises ValueError if a plugin's scores have another shape or are not
        finite."""
        scores_BHS = self.score.score_slots(slots)
        if _is_plugin(self.score):
            said = f"policy={self.name!r}, layer {slots.layer}: scores of {type(self.score).__name__} are"
            if scores_BHS.shape != slots.valid.shape or not scores_BHS.is_floating_point():
                there, shape = f"{scores_BHS.dtype} {list(scores_BHS.shape)}", list(slots.valid.shape)
                raise ValueError(f"{said} {there}, they must be floating point {shape}")
            if wrong := int((slots.valid & ~scores_BHS.isfinite()).sum()):
                there = f"{wrong} of {scores_BHS.numel()}"
                raise ValueError(f"{said} NaN or infinite for {there} slots, they must be finite")
        return scores_BHS

    @property
    def ranks(self) -> bool:
        """Whether ``index`` says which slots stay: the best scores do, and scopes ask for positions and statistics alone."""
        plugin = any(_is_plugin(scope) for scope in self.scopes)
        return not (self.ragged or plugin) and type(self.selection) is base.TopK

    def index(self, slots: Sequence[base.Slots], scores_LHS: Tensor) -> Tensor:
        """Index ``[L, H, keep]`` (ascending) of the slots that stay in layers of equal lengths; ``choose`` keeps the same."""
        first, guard = slots[0], None
        newest = [scope.protects_newest(first) for scope in self.scopes if not scope.idle]
        if None in newest or first.pinned is not None:
            whole = joined(slots) if len(slots) > 1 else first
            guard, newest = self.protected(whole).to(torch.uint8), []
            guard = guard if whole.pinned is None else guard.masked_fill(whole.pinned, 2)
        most = max((count or 0 for count in newest), default=0)
        return function("select_index", first.backend)(scores_LHS, first.keep, most, guard)

    def choose(self, slots: base.Slots, scores_BHS: Tensor | None = None) -> Tensor:
        """Boolean ``[B, H, S]``: the slots to keep, by score (computed if not given). Pinned slots stay. Scopes and
        selection share the rest of the head's budget as if the head held no pinned slots.

        Raises:
            ValueError: a plugin's invalid scores, see ``scores``, or a plugin that keeps a wrong number of slots.
        """
        stay_BHS = self._chosen(slots, self.scores(slots) if scores_BHS is None else scores_BHS)
        if _is_plugin(self.selection) or _is_plugin(self.allocation):
            most_BH, stays_BH = slots.valid.sum(-1), (stay_BHS & slots.valid).sum(-1)
            budgets_BH = most_BH.clamp(max=slots.keep)
            if self.ragged:  # heads may differ, their sum may not
                budgets_BH = most_BH.sum(-1).clamp(max=slots.keep * most_BH.shape[1])
                stays_BH = stays_BH.sum(-1)
            if not torch.equal(stays_BH, budgets_BH) or (stay_BHS & ~slots.valid).any():
                parts = f"{type(self.selection).__name__} and {type(self.allocation).__name__}"
                raise ValueError(
                    f"policy={self.name!r}, layer {slots.layer}: {parts} keep {stays_BH.tolist()} of the slots, they must keep "
                    f"{budgets_BH.tolist()}"
                )
        return stay_BHS

    def _chosen(self, slots: base.Slots, scores_BHS: Tensor) -> Tensor:
        """Boolean ``[B, H, S]``: the slots to keep by known scores, unchecked."""
        protected_BHS = self.protected(slots)
        budgets_BH = slots.valid.sum(-1).clamp(max=slots.keep)
        if self.ragged:
            measured_BHS = self.allocation.measured(self.score, scores_BHS, slots)
            budgets_BH = self.allocation.head_budgets(measured_BHS, protected_BHS, slots.valid, slots.keep)
        valid_BHS, pinned_BHS = slots.valid, slots.pinned
        if self.selection.by_query_head:
            slots = replace(slots, query_head_votes=partial(self.query_head_votes, slots, scores_BHS))
        if pinned_BHS is None:
            return self.selection.select(scores_BHS, protected_BHS, valid_BHS, budgets_BH, slots)
        taken_BH, free_BHS = pinned_BHS.sum(-1), valid_BHS & ~pinned_BHS
        left_BH = raised(budgets_BH, taken_BH) - taken_BH
        return self.selection.select(scores_BHS, protected_BHS & free_BHS, free_BHS, left_BH, slots) | pinned_BHS


def _is_plugin(part: base.Part) -> bool:
    """Whether a part is a plugin's. Its results are checked, and the host waits for the check."""
    return type(part).__module__.partition(".")[0] != __name__.partition(".")[0]
