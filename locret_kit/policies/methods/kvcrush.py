"""KVCrush, arXiv 2503.00022: another policy's best slots, and representatives of those that it evicts."""

from typing import Literal

import torch
from torch import Tensor

from ..base import Ratio, Selection, Slots, free_share, rank_of
from ..registry import part, register
from .random import hashed

LEVELS = {"token": 1, "chunk": 8, "page": 32}
"""Tokens of a unit."""


@part("selection", "representatives")
class Representatives(Selection):
    """The best of each head, and representatives of what goes: ``ratio`` of the budget. Source: KVCrush, section III.

    A token has one bit per head: is its score above the head's median? (0 in a head that does not hold it.) The tokens that no
    head keeps as one of its best and every head holds are ordered by the Hamming distance of their bits to an anchor (ties
    by position) and cut into as many equal groups as there are representatives; one of each group stays, the same in every
    head. Where there are too few such tokens, and in a head with a larger budget, the best by score fill what is left.
    By chunks or pages, scores are summed over the unit, its bits are those of all its tokens, and units stay or go as a whole
    but for the last one.
    """

    ratio: Ratio = 0.25
    anchor: Literal["mean", "random", "alternate", "zeros", "ones"] = "mean"
    """'mean' (majority bit), 'random', 'alternate' (0101...), 'zeros' or 'ones'."""
    pick: Literal["even", "random"] = "even"
    """The member of a group that stays: its first ('even', evenly spaced) or a drawn one ('random')."""
    level: Literal["token", "chunk", "page"] = "token"
    """'token', 'chunk' (8 tokens) or 'page' (32 tokens)."""

    def aside(self, budget: int) -> int:
        return int(budget * self.ratio)

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: Slots
    ) -> Tensor:
        unit = LEVELS[self.level]
        position_BHS = slots.positions.long()
        if unit > 1:
            scores_BHS = _sum_over_units(scores_BHS, position_BHS // unit, valid_BHS)
        wanted_B = free_share(budgets_BH.amin(1, keepdim=True), self.ratio, protected_BHS).amin(1)
        best_BHS = rank_of(scores_BHS, protected_BHS, valid_BHS) < (budgets_BH - wanted_B[:, None])[..., None]
        median_BH1 = scores_BHS.masked_fill(~valid_BHS, float("nan")).nanmedian(-1, keepdim=True).values
        bit_BHS = (scores_BHS > median_BH1) & valid_BHS
        chosen_BHS = best_BHS.clone()
        for b, wanted in enumerate(wanted_B.tolist()):
            tokens = self._representatives(
                position_BHS[b], bit_BHS[b], valid_BHS[b], best_BHS[b] | protected_BHS[b], wanted, slots
            )
            chosen_BHS[b] |= torch.isin(position_BHS[b], tokens) & valid_BHS[b]
        return rank_of(scores_BHS, protected_BHS | chosen_BHS, valid_BHS) < budgets_BH[..., None]

    def _representatives(
        self, position_HS: Tensor, bit_HS: Tensor, valid_HS: Tensor, taken_HS: Tensor, wanted: int, slots: Slots
    ) -> Tensor:
        """Positions of the representatives of one layer, at most ``wanted``."""
        unit, (H, _) = LEVELS[self.level], position_HS.shape
        token_N, where_N = position_HS[valid_HS].unique(return_inverse=True)
        count = lambda flag_HS: torch.zeros_like(token_N).index_add_(0, where_N, flag_HS[valid_HS].long())  # noqa: E731
        free_N = (count(valid_HS) == H) & (count(taken_HS) == 0)
        unit_U, unit_of_N = (token_N // unit).unique(return_inverse=True)
        bits = torch.zeros(len(unit_U), unit, H, dtype=torch.bool, device=bit_HS.device)
        head_M = torch.arange(H, device=bit_HS.device)[:, None].expand_as(position_HS)[valid_HS]
        bits[unit_of_N[where_N], token_N[where_N] % unit, head_M] = bit_HS[valid_HS]
        free_U = torch.zeros(len(unit_U), dtype=torch.bool, device=bit_HS.device)
        free_U[unit_of_N[free_N]] = True
        candidates_C = free_U.nonzero().flatten()
        groups = min(wanted // unit, len(candidates_C))
        if not groups:
            return token_N[:0]
        bits_CX = bits[candidates_C].flatten(1)
        distance_C = (bits_CX != self._anchor(bits_CX, slots)).sum(-1)
        ordered_C = candidates_C[distance_C.argsort(stable=True)]
        edge = torch.arange(groups + 1, device=ordered_C.device) * len(ordered_C) // groups
        inside = torch.zeros_like(edge[:-1])
        if self.pick == "random":
            draw = hashed(torch.arange(groups, device=edge.device), slots.seed, slots.layer, slots.seen)
            inside = (draw * edge.diff()).long()
        return token_N[torch.isin(unit_of_N, ordered_C[edge[:-1] + inside]) & free_N]

    def _anchor(self, bits_CX: Tensor, slots: Slots) -> Tensor:
        """The anchor's bits ``[X]``: a token's heads, or all heads of all tokens of a unit."""
        X = bits_CX.shape[1]
        at_X = torch.arange(X, device=bits_CX.device)
        if self.anchor == "mean":
            return bits_CX.float().mean(0) > 0.5
        made = {
            "random": lambda: hashed(at_X, slots.seed, slots.layer, slots.seen, 1) < 0.5,
            "alternate": lambda: at_X % 2 == 1,
            "zeros": lambda: at_X < 0,
            "ones": lambda: at_X >= 0,
        }
        return made[self.anchor]()


def _sum_over_units(scores_BHS: Tensor, unit_BHS: Tensor, valid_BHS: Tensor) -> Tensor:
    """Each slot's score replaced by the sum over the slots that its head holds of its unit. Units ascend along a head."""
    S = scores_BHS.shape[-1]
    new_BHS = torch.ones_like(unit_BHS)
    new_BHS[..., 1:] = unit_BHS.diff(dim=-1) != 0
    run_BHS = new_BHS.cumsum(-1) - 1
    total_BHS = scores_BHS.new_zeros(*scores_BHS.shape[:2], S)
    total_BHS.scatter_add_(-1, run_BHS, scores_BHS.masked_fill(~valid_BHS, 0))
    return total_BHS.gather(-1, run_BHS)


register("kvcrush", "KVCrush, arXiv 2503.00022", {"selection": Representatives()}, base="h2o")
