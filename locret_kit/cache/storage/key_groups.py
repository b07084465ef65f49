"""Groups of rows whose keys are quantised together: a table of fixed size for every head.

Most rows are in groups of up to ``GROUP`` rows like them. Rows that stand out would coarsen the steps of any group; they go in
pairs, whose two numbers in a channel are its zero point and its last code: they are read back as exactly as float16 holds
the zero point and what parts them.

The pairs are why 4 bits lose nothing that shows: without them smollm2-135m-locret found 85 of 94 pass keys in 4 bits and 90
in full precision; with them the difference is -0.7 +- 1.7 points (LOG.md of that checkpoint).
"""

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
    keys_HSD: Tensor, group_HS: Tensor, leaving_HS: Tensor, groups: int, size: int, pairs: int = 0
) -> tuple[Tensor, Tensor]:
    """New groups of rows that must be quantised: ``(target [H, S], made [H, groups])``.

    A head takes its sparsest groups, free ones first: the fewest with room for their own rows and the rows that leave the
    tail. It fills them anew: rows that stand out in pairs, the others like with like. ``target`` is a row's new group, -1
    where it stays as it is; ``made`` says which groups are taken. A head without leaving rows takes none.

    Args:
        keys_HSD: keys, to judge the likeness of rows.
        group_HS: int64, the group of each row, -1 where it is not quantised.
        leaving_HS: bool, the rows to quantise; they have no group yet.
        groups: groups of a head, enough for the rows with a group and those that leave (see ``table_size``).
        size: rows of a full group.
        pairs: pairs of a head.
    """
    # A row is in a group (held), leaves the tail (leaving), or stays in the tail (neither).
    held_HS = group_HS >= 0
    own_HS = group_HS.clamp(min=0)

    def counted(chosen_HS: Tensor) -> Tensor:
        """Number of the chosen rows in each group."""
        in_HM = torch.zeros(len(group_HS), groups, dtype=torch.int64, device=group_HS.device)
        return in_HM.scatter_add_(1, own_HS, (held_HS & chosen_HS).long())

    # 1. The M sparsest groups are candidates, for M from 1 on: [H, groups], the emptiest first.
    rows_HM = counted(torch.ones_like(held_HS))
    order_HM = rows_HM.argsort(dim=-1, stable=True)
    loose_HS = leaving_HS | (held_HS & (rows_HM.gather(1, own_HS) <= 2))  # of a fuller group it is too late
    paired_HS = _standing_out(keys_HSD, held_HS | leaving_HS, loose_HS, 2 * pairs)

    # 2. Groups of each kind (likes, pairs) that are needed where the M sparsest groups are taken: [H, M].
    needed_KHM = []
    for chosen_HS, full in ((~paired_HS, size), (paired_HS, 2)):
        entering_H1 = (leaving_HS & chosen_HS).sum(-1, keepdim=True)
        moved_HM = counted(chosen_HS).gather(1, order_HM).cumsum(1) + entering_H1
        needed_KHM.append((moved_HM + full - 1) // full)
    # 3. The smallest M that makes room; nothing is taken where no row leaves.
    number_M = torch.arange(groups, device=group_HS.device)
    any_H1 = leaving_HS.any(-1, keepdim=True)
    last_H1 = (needed_KHM[0] + needed_KHM[1] <= number_M + 1).int().argmax(-1, keepdim=True)
    made_HM = torch.zeros_like(rows_HM, dtype=torch.bool).scatter_(1, order_HM, (number_M <= last_H1) & any_H1)

    # 4. Rows of the taken groups and those that leave are laid out anew: likes first, then pairs.
    chosen_HS = leaving_HS | (held_HS & made_HM.gather(1, own_HS))
    place_HS = rank_alike(keys_HSD, chosen_HS & ~paired_HS) // size
    pair_HS = _rank((chosen_HS & paired_HS).logical_not().to(keys_HSD.dtype)) // 2
    place_HS = torch.where(paired_HS, needed_KHM[0].gather(1, last_H1) + pair_HS, place_HS)
    target_HS = order_HM.gather(1, place_HS.clamp(max=groups - 1))
    return target_HS.masked_fill(~chosen_HS, -1), made_HM


def _standing_out(keys_HSD: Tensor, all_HS: Tensor, loose_HS: Tensor, most: int) -> Tensor:
    """Mark the loose rows that are the ``most`` of each head that are furthest from the mean of all, in standard deviations of a
    channel."""
    y_HSD, by_H1S = _centred(keys_HSD, all_HS)
    square_HSD = y_HSD.square_()
    variance_H1D = by_H1S @ square_HSD / by_H1S.sum(-1, keepdim=True).clamp(min=1)
    far_HS = (square_HSD @ variance_H1D.clamp(min=1e-12).reciprocal().transpose(-1, -2))[..., 0]
    return loose_HS & (_rank((-far_HS).masked_fill(~loose_HS, float("inf"))) < most)


def rank_alike(keys_HSD: Tensor, chosen_HS: Tensor) -> Tensor:
    """Ranks ``[H, S]`` of the chosen rows of each head, with alike rows next to each other. Other rows rank after
    them.

    The order is that along one direction, the covariance of all channels with the one that varies most: the first step towards
    the rows' first principal component.
    """
    y_HSD, by_H1S = _centred(keys_HSD, chosen_HS)
    widest_H11 = (by_H1S @ y_HSD.square()).argmax(-1, keepdim=True)
    direction_H1D = by_H1S @ (y_HSD * y_HSD.take_along_dim(widest_H11, 2))
    return _rank((y_HSD * direction_H1D).sum(-1).masked_fill(~chosen_HS, float("inf")))


def _centred(keys_HSD: Tensor, chosen_HS: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen keys less their mean, the others as they are; and which are chosen ``[H, 1, S]``, as numbers."""
    by_H1S = chosen_HS[:, None].to(keys_HSD.dtype)
    mean_H1D = by_H1S @ keys_HSD / by_H1S.sum(-1, keepdim=True).clamp(min=1)
    return keys_HSD - by_H1S.mT * mean_H1D, by_H1S


def _rank(place_HS: Tensor) -> Tensor:
    """Ranks ``[H, S]`` by place; of equals the older is first."""
    return place_HS.argsort(dim=-1, stable=True).argsort(dim=-1)
