"""KVCrush, arXiv 2503.00022: another policy's best slots, and representatives of those that it evicts."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base import Positive, Ratio, Selection, Slots, best_of, share_of, wide
from ..registry import part, register
from .random import hashed

LEVELS = {"token": 1, "chunk": 8, "page": 32}
"""Tokens of a unit."""


Pick = Literal["even", "random"]


def _places(pick: Pick, edges_HJ: Tensor, slots: Slots) -> Tensor:
    """Index ``[H, J]``, in a head's order, of each group's representative: the first ('even') or a random member
    ('random'). Group ``j`` lies between the edges ``j`` and ``j + 1`` of ``J + 1`` edges."""
    first_HJ = edges_HJ[:, :-1]
    if pick == "even":
        return first_HJ
    draw_J = hashed(torch.arange(first_HJ.shape[1], device=edges_HJ.device), slots.seed, slots.layer, slots.seen)
    return first_HJ + (draw_J * edges_HJ.diff(dim=-1)).long()


@part("selection", "representatives")
class Representatives(Selection):
    """The best slots of each head, and representatives of the evicted ones: ``ratio`` of its budget. Source:
    KVCrush, section III.

    Score and scopes share the rest of the budget, B_important; a window given as a fraction is a fraction of that. A
    token's vector has one bit per query head of the layer: would score and scopes keep it, with B_important slots,
    in that query head alone? A head that does not hold the token has evicted it. A head's evicted tokens are
    ordered by the Hamming distance of their vectors to an anchor (ties by position) and cut into equal groups, one
    per representative. One token of each group stays. With chunks or pages, scores are summed over the unit, and its
    vector is that of its tokens together. Representatives are whole units, and units stay or go as a whole except
    the last one of B_important.

    The paper leaves two points open. Here buckets are equal groups of the order by distance, and if heads keep
    different tokens, each head has representatives of its own evicted tokens.
    """

    ratio: Ratio = 0.25
    anchor: Literal["mean", "random", "alternate", "zeros", "ones"] = "mean"
    """'mean' (majority bit of the head's evicted tokens), 'random', 'alternate' (0101...), 'zeros' or 'ones'."""
    pick: Pick = "even"
    """The member of a group that stays: its first ('even', evenly spaced) or a drawn one ('random', as in the paper)."""
    level: Literal["token", "chunk", "page"] = "token"
    """'token', 'chunk' (8 tokens) or 'page' (32 tokens)."""
    bits: Literal["kept", "median"] = "kept"
    """'kept': as above. 'median': one bit per key/value head, whether the score is above the head's median, which is the
    paper's example of a compression to one half and needs no statistics of query heads."""

    @property
    def by_query_head(self) -> bool:
        return self.bits == "kept"

    def reserved_slots(self, budget: int) -> int:
        return int(budget * self.ratio) // LEVELS[self.level] * LEVELS[self.level]

    def shortfall(self, budget: int) -> str:
        if self.ratio * budget < 1 or self.reserved_slots(budget):
            return ""
        return f"has no room for a {self.level}: {self.ratio} of the budget is below {LEVELS[self.level]} tokens"

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: Slots
    ) -> Tensor:
        unit = LEVELS[self.level]
        position_BHS = slots.positions.long()
        wanted_BH = share_of(budgets_BH, self.ratio) // unit * unit
        own_BH = budgets_BH - wanted_BH
        bits_BHGS = self._bits(scores_BHS, valid_BHS, own_BH, slots)
        if unit > 1:
            scores_BHS = _sum_over_units(scores_BHS, position_BHS // unit, valid_BHS)
        best_BHS = best_of(scores_BHS, protected_BHS, valid_BHS, own_BH, slots.backend)
        free_BHS = valid_BHS & ~best_BHS
        chosen_BHS = best_BHS.clone()
        for b, groups in enumerate((wanted_BH // unit).amax(-1).tolist()):
            if groups:
                own = (x[b] for x in (position_BHS, bits_BHGS, valid_BHS, free_BHS, wanted_BH // unit))
                chosen_BHS[b] |= self._representatives(slots, groups, *own)
        return best_of(scores_BHS, chosen_BHS, valid_BHS, budgets_BH, slots.backend)

    def _bits(self, scores_BHS: Tensor, valid_BHS: Tensor, own_BH: Tensor, slots: Slots) -> Tensor:
        """Bits ``[B, H, G, S]`` of every slot in the query heads of its head (``G`` is 1 where those agree)."""
        if self.bits == "kept":
            assert slots.query_head_votes is not None  # by_query_head
            return slots.query_head_votes(valid_BHS, own_BH)
        median_BH1 = scores_BHS.masked_fill(~valid_BHS, float("nan")).nanmedian(-1, keepdim=True).values
        return ((scores_BHS > median_BH1) & valid_BHS)[:, :, None]

    def _representatives(
        self, slots: Slots, max_units: int, position_HS: Tensor, bits_HGS: Tensor, valid_HS: Tensor, free_HS: Tensor,
        wanted_H: Tensor,
    ) -> Tensor:  # fmt: skip
        """Boolean ``[H, S]``: the slots of the ``wanted`` units, at most ``max_units``, that represent a head's
        evicted slots."""
        unit, (H, G, S) = LEVELS[self.level], bits_HGS.shape
        unit_U, unit_of_M = (position_HS[valid_HS] // unit).unique(return_inverse=True)
        unit_of_HS = torch.zeros_like(position_HS).masked_scatter(valid_HS, unit_of_M)
        head_HS = torch.arange(H, device=position_HS.device)[:, None].expand(H, S)
        # Bits [U, unit, H, G] of the tokens of all heads; 0 in a head that does not hold the token.
        bits = bits_HGS.new_zeros(len(unit_U), unit, H, G)
        bits[unit_of_M, position_HS[valid_HS] % unit, head_HS[valid_HS]] = bits_HGS.transpose(1, 2)[valid_HS]
        bits_UX = bits.flatten(1)
        free_HU = torch.zeros(H, len(unit_U), dtype=torch.bool, device=position_HS.device)
        free_HU[head_HS[free_HS], unit_of_HS[free_HS]] = True
        anchor_HX = self._anchor(bits_UX, free_HU, slots)
        # Hamming distance: ones of the vector that the anchor lacks, and ones of the anchor that the vector lacks.
        x_UX, a_HX = bits_UX.float(), anchor_HX.float()
        distance_HU = x_UX.sum(-1) + a_HX.sum(-1, keepdim=True) - 2 * a_HX @ x_UX.T
        order_HU = distance_HU.masked_fill(~free_HU, float("inf")).argsort(dim=-1, stable=True)
        count_H1 = free_HU.sum(-1, keepdim=True)
        groups_H1 = wanted_H[:, None].minimum(count_H1)
        edges_HJ = torch.arange(max_units + 1, device=count_H1.device) * count_H1 // groups_H1.clamp(min=1)
        place_HJ = _places(self.pick, edges_HJ, slots)
        there_HJ = torch.arange(max_units, device=count_H1.device) < groups_H1
        chosen_HU = torch.zeros_like(free_HU)
        picked_HJ = order_HU.gather(1, place_HJ.clamp(max=len(unit_U) - 1))
        chosen_HU[head_HS[:, :1].expand_as(picked_HJ)[there_HJ], picked_HJ[there_HJ]] = True
        return chosen_HU.gather(1, unit_of_HS) & free_HS

    def _anchor(self, bits_UX: Tensor, free_HU: Tensor, slots: Slots) -> Tensor:
        """The anchor's bits ``[H, X]`` for each head's candidates: of a token's query heads, or of all tokens of a unit."""
        if self.anchor == "mean":
            return free_HU.float() @ bits_UX.float() * 2 > free_HU.sum(-1, keepdim=True)
        at_X = torch.arange(bits_UX.shape[1], device=bits_UX.device)
        made = {
            "random": lambda: hashed(at_X, slots.seed, slots.layer, slots.seen, 1) < 0.5,
            "alternate": lambda: at_X % 2 == 1,
            "zeros": lambda: at_X < 0,
            "ones": lambda: at_X >= 0,
        }
        return made[self.anchor]().expand(len(free_HU), -1)


@part("selection", "kmeans")
class KMeans(Selection):
    """The best slots of each head, and one slot per cluster of the evicted keys: ``ratio`` of its budget. Clusters
    are those of k-means: squared distance, Lloyd's iteration, starting from keys spaced evenly over the text. Score
    and scopes share the rest of the budget. Source: KVCrush, section IV-C, as a baseline; the paper does not specify
    keys and start."""

    ratio: Ratio = 0.25
    pick: Pick = "even"
    """The member of a cluster that stays: its oldest ('even') or a drawn one ('random')."""
    iterations: Positive = 10

    def reserved_slots(self, budget: int) -> int:
        return int(budget * self.ratio)

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: Slots
    ) -> Tensor:
        wanted_BH = share_of(budgets_BH, self.ratio)
        own_BH = budgets_BH - wanted_BH
        chosen_BHS = best_of(scores_BHS, protected_BHS, valid_BHS, own_BH, slots.backend)
        free_BHS, keys_BHSD = valid_BHS & ~chosen_BHS, slots.keys()
        for b, heads in enumerate(wanted_BH.tolist()):
            for h, wanted in enumerate(heads):
                free_N = free_BHS[b, h].nonzero()[:, 0]
                if wanted and len(free_N):
                    chosen_BHS[b, h, free_N[self._members(wide(keys_BHSD[b, h, free_N]), wanted, slots)]] = True
        return best_of(scores_BHS, chosen_BHS, valid_BHS, budgets_BH, slots.backend)

    def _members(self, key_ND: Tensor, wanted: int, slots: Slots) -> Tensor:
        """Indices of one key of each cluster, at most ``wanted``."""
        N, groups = len(key_ND), min(wanted, len(key_ND))
        centre_JD = key_ND[torch.arange(groups, device=key_ND.device) * N // groups]
        for _ in range(self.iterations):
            nearest_N = torch.cdist(key_ND, centre_JD).argmin(-1)
            size_J1 = torch.bincount(nearest_N, minlength=groups)[:, None]
            mean_JD = torch.zeros_like(centre_JD).index_add_(0, nearest_N, key_ND) / size_J1.clamp(min=1)
            centre_JD = torch.where(size_J1 > 0, mean_JD, centre_JD)  # an empty cluster stays where it is
        nearest_N = torch.cdist(key_ND, centre_JD).argmin(-1)
        order_N, size_J = nearest_N.argsort(stable=True), torch.bincount(nearest_N, minlength=groups)
        edges_1J = torch.cat((size_J.new_zeros(1), size_J.cumsum(0)))[None]
        return order_N[_places(self.pick, edges_1J, slots)[0][size_J > 0]]


def _sum_over_units(scores_BHS: Tensor, unit_BHS: Tensor, valid_BHS: Tensor) -> Tensor:
    """Each slot's score replaced by the sum over the slots that its head holds of its unit. Units ascend along a head."""
    run_BHS = F.pad((unit_BHS.diff(dim=-1) != 0).cumsum(-1), (1, 0))
    held_BHS = scores_BHS.masked_fill(~valid_BHS, 0)
    return torch.zeros_like(scores_BHS).scatter_add_(-1, run_BHS, held_BHS).gather(-1, run_BHS)


register(
    "kvcrush",
    "KVCrush, arXiv 2503.00022",
    {"selection": Representatives()},
    base="h2o",
    keeps="another policy's score, and representatives of its evicted slots",
)
