"""Grouping of rows whose keys are quantised together: a table of groups of fixed size for every head.

Most rows are in groups of up to ``GROUP`` rows like them. Rows that stand out would coarsen the steps of any group; they go in
pairs, whose two numbers in a channel are its zero point and its last code: they are read back as exactly as float16 holds
the zero point and what parts them.

The pairs are why 4 bits lose nothing that shows: without them smollm2-135m-locret found 85 of 94 pass keys in 4 bits and 90
in full precision; with them the difference is -0.7 +- 1.7 points (LOG.md of that checkpoint).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Rows of a key group."""
SPARE = 0.5
"""Groups in the table beyond what full groups need, as a fraction: a full table's groups are then two thirds full on average."""

OUTLIERS = 1 / 16
"""Rows of a head that go in pairs, as a fraction of its capacity."""


def pairs_of(capacity: int) -> int:
    """Pairs of a head with so much room."""
    return int(capacity * OUTLIERS) // 2


def table_size(capacity: int, spare: float = SPARE, size: int = GROUP) -> int:
    """Groups in the table of a head with so much room: at least one for every ``size`` rows, and one for every pair."""
    return -(-int(capacity * (1 + spare)) // size) + pairs_of(capacity)


def regroup(
    keys_BHSD: Tensor, group_BHS: Tensor, leaving_BHS: Tensor, groups: int, size: int, pairs: int = 0
) -> tuple[Tensor, Tensor]:
    """Where rows go that must be quantised: ``(target [B, H, S], made [B, H, groups])``.

    A head takes the fewest of its sparsest groups (free ones first) that together have room for their own rows and for
    those that leave the tail, and fills them anew: rows that stand out in pairs, the others like with like. ``target`` is a
    row's new group, -1 where it stays as it is; ``made`` says which groups are taken. A head in which no row leaves takes none.

    Args:
        keys_BHSD: what a row's likeness is judged by.
        group_BHS: int64, the group of each row, -1 where it is not quantised.
        leaving_BHS: bool, the rows to quantise, none of which has a group.
        groups: groups of a head, enough for the rows with a group and those that leave (see ``table_size``).
        size: rows of a full group.
        pairs: pairs of a head.
    """
    # A row is in a group (held), leaves the tail (leaving), or stays in the tail (neither).
    held_BHS = group_BHS >= 0
    own_BHS = group_BHS.clamp(min=0)

    def counted(chosen_BHS: Tensor) -> Tensor:
        """How many of the chosen rows are in each group."""
        in_BHM = torch.zeros(*group_BHS.shape[:2], groups, dtype=torch.int64, device=group_BHS.device)
        return in_BHM.scatter_add_(2, own_BHS, (held_BHS & chosen_BHS).long())

    # 1. The M sparsest groups are candidates, for M from 1 on: [B, H, groups], the emptiest first.
    rows_BHM = counted(torch.ones_like(held_BHS))
    order_BHM = rows_BHM.argsort(dim=-1, stable=True)
    loose_BHS = leaving_BHS | (held_BHS & (rows_BHM.gather(2, own_BHS) <= 2))  # of a fuller group it is too late
    paired_BHS = _standing_out(keys_BHSD, held_BHS | leaving_BHS, loose_BHS, 2 * pairs)

    # 2. Groups of each kind (likes, pairs) that are needed where the M sparsest groups are taken: [B, H, M].
    needed_KBHM = []
    for chosen_BHS, full in ((~paired_BHS, size), (paired_BHS, 2)):
        entering_BH1 = (leaving_BHS & chosen_BHS).sum(-1, keepdim=True)
        moved_BHM = counted(chosen_BHS).gather(2, order_BHM).cumsum(2) + entering_BH1
        needed_KBHM.append((moved_BHM + full - 1) // full)
    # 3. The smallest M that makes room; nothing is taken where no row leaves.
    number_M = torch.arange(groups, device=group_BHS.device)
    any_BH1 = leaving_BHS.any(-1, keepdim=True)
    last_BH1 = (needed_KBHM[0] + needed_KBHM[1] <= number_M + 1).int().argmax(-1, keepdim=True)
    made_BHM = torch.zeros_like(rows_BHM, dtype=torch.bool).scatter_(2, order_BHM, (number_M <= last_BH1) & any_BH1)

    # 4. Rows of the taken groups and those that leave are laid out anew: likes first, then pairs.
    chosen_BHS = leaving_BHS | (held_BHS & made_BHM.gather(2, own_BHS))
    place_BHS = rank_alike(keys_BHSD, chosen_BHS & ~paired_BHS) // size
    pair_BHS = _rank((chosen_BHS & paired_BHS).logical_not().to(keys_BHSD.dtype)) // 2
    place_BHS = torch.where(paired_BHS, needed_KBHM[0].gather(2, last_BH1) + pair_BHS, place_BHS)
    target_BHS = order_BHM.gather(2, place_BHS.clamp(max=groups - 1))
    return target_BHS.masked_fill(~chosen_BHS, -1), made_BHM


def _standing_out(keys_BHSD: Tensor, all_BHS: Tensor, loose_BHS: Tensor, most: int) -> Tensor:
    """Mark the loose rows that are the ``most`` of each head that are furthest from the mean of all, in standard deviations of a
    channel."""
    y_BHSD, by_BH1S = _centred(keys_BHSD, all_BHS)
    square_BHSD = y_BHSD.square_()
    variance_BH1D = by_BH1S @ square_BHSD / by_BH1S.sum(-1, keepdim=True).clamp(min=1)
    far_BHS = (square_BHSD @ variance_BH1D.clamp(min=1e-12).reciprocal().transpose(-1, -2))[..., 0]
    return loose_BHS & (_rank((-far_BHS).masked_fill(~loose_BHS, float("inf"))) < most)


def rank_alike(keys_BHSD: Tensor, chosen_BHS: Tensor) -> Tensor:
    """Ranks ``[B, H, S]`` of the chosen rows of each head, in which neighbours are alike; other rows rank after them.

    The order is that along one direction, the covariance of all channels with the one that varies most: the first step towards
    the rows' first principal component.
    """
    y_BHSD, by_BH1S = _centred(keys_BHSD, chosen_BHS)
    widest_BH11 = (by_BH1S @ y_BHSD.square()).argmax(-1, keepdim=True)
    direction_BH1D = by_BH1S @ (y_BHSD * y_BHSD.take_along_dim(widest_BH11, 3))
    return _rank((y_BHSD * direction_BH1D).sum(-1).masked_fill(~chosen_BHS, float("inf")))


def _centred(keys_BHSD: Tensor, chosen_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen keys less their mean, the others as they are; and which are chosen ``[B, H, 1, S]``, as numbers."""
    by_BH1S = chosen_BHS[:, :, None].to(keys_BHSD.dtype)
    mean_BH1D = by_BH1S @ keys_BHSD / by_BH1S.sum(-1, keepdim=True).clamp(min=1)
    return keys_BHSD - by_BH1S.mT * mean_BH1D, by_BH1S


def _rank(place_BHS: Tensor) -> Tensor:
    """Ranks ``[B, H, S]`` by place; of equals the older is first."""
    return place_BHS.argsort(dim=-1, stable=True).argsort(dim=-1)
