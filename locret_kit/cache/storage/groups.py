"""Grouping of rows whose keys are quantised together: a table of groups of fixed size, per head or per layer.

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


def table_size(capacity: int, heads: int = 1, spare: float = SPARE, size: int = GROUP) -> int:
    """Groups in a table that ``heads`` share, ``heads * capacity`` rows in whatever parts: at least one for every ``size``
    rows and begun ``size`` of a head, and one for every pair."""
    # Enough for full groups and spare ones; and at the least, since groups are of one head, a begun group per head.
    wanted = heads * -(-int(capacity * (1 + spare)) // size)
    return max(wanted, heads + heads * (capacity - 1) // size) + heads * pairs_of(capacity)


def regroup(
    keys_BTSD: Tensor,
    group_BTS: Tensor,
    leaving_BTS: Tensor,
    head_BTS: Tensor,
    heads: int,
    groups: int,
    size: int,
    pairs: int = 0,
) -> tuple[Tensor, Tensor]:
    """Where rows go that must be quantised: ``(target [B, T, S], made [B, T, groups])``, for each of ``B * T`` tables.

    A table takes the fewest of its sparsest groups (free ones first) that together have room for their own rows and for
    those that leave the tail, each head's rows in groups of their own, and fills them anew: rows that stand out in pairs,
    the others like with like. ``target`` is a row's new group, -1 where it stays as it is; ``made`` says which groups are
    taken. A table in which no row leaves takes none.

    Args:
        keys_BTSD: what a row's likeness is judged by.
        group_BTS: int64, the group of each row, -1 where it is not quantised; no group has rows of two heads.
        leaving_BTS: bool, the rows to quantise, none of which has a group.
        head_BTS: int64, ascending, the head of each row among the ``heads`` that share the table.
        groups: groups of a table, enough for the rows with a group and those that leave (see ``table_size``).
        size: rows of a full group.
        pairs: pairs of a head.
    """
    # A row is in a group (held), leaves the tail (leaving), or stays in the tail (neither).
    held_BTS = group_BTS >= 0
    own_BTS = group_BTS.clamp(min=0)

    def counted(chosen_BTS: Tensor) -> tuple[Tensor, Tensor]:
        """Of the chosen rows of each head: how many are in each group, and how many leave."""
        in_BTMH = torch.zeros(*group_BTS.shape[:2], groups * heads, dtype=torch.int64, device=group_BTS.device)
        in_BTMH.scatter_add_(2, own_BTS * heads + head_BTS, (held_BTS & chosen_BTS).long())
        leaving_BTH = torch.zeros(*group_BTS.shape[:2], heads, dtype=torch.int64, device=group_BTS.device)
        leaving_BTH.scatter_add_(2, head_BTS, (leaving_BTS & chosen_BTS).long())
        return in_BTMH.unflatten(-1, (groups, heads)), leaving_BTH

    # 1. The M sparsest groups are candidates, for M from 1 on: [B, T, groups], the emptiest first.
    rows_BTM = counted(torch.ones_like(held_BTS))[0].sum(-1)
    order_BTM = rows_BTM.argsort(dim=-1, stable=True)
    loose_BTS = leaving_BTS | (held_BTS & (rows_BTM.gather(2, own_BTS) <= 2))  # of a fuller group it is too late
    paired_BTS = _standing_out(keys_BTSD, held_BTS | leaving_BTS, loose_BTS, head_BTS, heads, 2 * pairs)

    # 2. Groups of each kind (likes, pairs) that each head needs where the M sparsest groups are taken: [B, T, M, heads].
    needed_KBTMH = []
    for chosen_BTS, full in ((~paired_BTS, size), (paired_BTS, 2)):
        rows_BTMH, entering_BTH = counted(chosen_BTS)
        moved_BTMH = rows_BTMH.gather(2, order_BTM[..., None].expand_as(rows_BTMH)).cumsum(2) + entering_BTH[:, :, None]
        needed_KBTMH.append((moved_BTMH + full - 1) // full)
    needed_BTMH = needed_KBTMH[0] + needed_KBTMH[1]
    # 3. The smallest M that makes room for all heads; nothing is taken where no row leaves.
    number_M = torch.arange(groups, device=group_BTS.device)
    any_BT1 = leaving_BTS.any(-1, keepdim=True)
    last_BT1 = (needed_BTMH.sum(-1) <= number_M + 1).int().argmax(-1, keepdim=True)
    made_BTM = torch.zeros_like(rows_BTM, dtype=torch.bool).scatter_(2, order_BTM, (number_M <= last_BT1) & any_BT1)

    # 4. Rows of the taken groups and those that leave are laid out anew: heads in order, likes first, then pairs.
    chosen_BTS = leaving_BTS | (held_BTS & made_BTM.gather(2, own_BTS))
    in_groups_BTH, needed_BTH = (
        n.gather(2, last_BT1[..., None].expand(-1, -1, 1, heads))[:, :, 0] for n in (needed_KBTMH[0], needed_BTMH)
    )
    place_BTS = rank_alike(keys_BTSD, chosen_BTS & ~paired_BTS, head_BTS, heads) // size
    pair_BTS = _rank((chosen_BTS & paired_BTS).logical_not().to(keys_BTSD.dtype), head_BTS, heads) // 2
    place_BTS = torch.where(paired_BTS, in_groups_BTH.gather(2, head_BTS) + pair_BTS, place_BTS)
    place_BTS = place_BTS + (needed_BTH.cumsum(-1) - needed_BTH).gather(2, head_BTS)
    target_BTS = order_BTM.gather(2, place_BTS.clamp(max=groups - 1))
    return target_BTS.masked_fill(~chosen_BTS, -1), made_BTM


def _standing_out(
    keys_BTSD: Tensor, all_BTS: Tensor, loose_BTS: Tensor, head_BTS: Tensor, heads: int, most: int
) -> Tensor:
    """Mark the loose rows that are the ``most`` of each head that are furthest from the mean of all, in standard deviations of a
    channel."""
    y_BTSD, of_BTSH = _centred(keys_BTSD, all_BTS, head_BTS, heads)
    by_BTHS, square_BTSD = of_BTSH.transpose(-1, -2), y_BTSD.square_()
    variance_BTHD = by_BTHS @ square_BTSD / by_BTHS.sum(-1, keepdim=True).clamp(min=1)
    far_BTSH = square_BTSD @ variance_BTHD.clamp(min=1e-12).reciprocal().transpose(-1, -2)
    far_BTS = far_BTSH.gather(3, head_BTS[..., None])[..., 0]
    return loose_BTS & (_rank((-far_BTS).masked_fill(~loose_BTS, float("inf")), head_BTS, heads) < most)


def rank_alike(keys_BTSD: Tensor, chosen_BTS: Tensor, head_BTS: Tensor, heads: int) -> Tensor:
    """Ranks ``[B, T, S]`` of the chosen rows of each head, in which neighbours are alike; other rows rank after them.

    The order is that along one direction, the covariance of all channels with the one that varies most: the first step towards
    the rows' first principal component.
    """
    y_BTSD, of_BTSH = _centred(keys_BTSD, chosen_BTS, head_BTS, heads)
    by_BTHS = of_BTSH.transpose(-1, -2)
    widest_BTH = (by_BTHS @ y_BTSD.square()).argmax(-1)
    direction_BTHD = by_BTHS @ (y_BTSD * y_BTSD.gather(3, widest_BTH.gather(2, head_BTS)[..., None]))
    place_BTS = (y_BTSD * (of_BTSH @ direction_BTHD)).sum(-1).masked_fill(~chosen_BTS, float("inf"))
    return _rank(place_BTS, head_BTS, heads)


def _centred(keys_BTSD: Tensor, chosen_BTS: Tensor, head_BTS: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys less the mean of the chosen ones of their head, and which head ``[B, T, S, heads]`` each chosen row is of."""
    of_BTSH = head_BTS[..., None] == torch.arange(heads, device=head_BTS.device)
    of_BTSH = (of_BTSH & chosen_BTS[..., None]).to(keys_BTSD.dtype)
    by_BTHS = of_BTSH.transpose(-1, -2)
    return keys_BTSD - of_BTSH @ (by_BTHS @ keys_BTSD / by_BTHS.sum(-1, keepdim=True).clamp(min=1)), of_BTSH


def _rank(place_BTS: Tensor, head_BTS: Tensor, heads: int) -> Tensor:
    """Ranks ``[B, T, S]`` of the rows of each head by place; of equals the older is first."""
    # Two stable sorts: by place, then by head, so that rows of a head lie together in order of place.
    order_BTS = place_BTS.argsort(dim=-1, stable=True)
    order_BTS = order_BTS.gather(2, head_BTS.gather(2, order_BTS).argsort(dim=-1, stable=True))
    rows_BTH = (head_BTS[..., None] == torch.arange(heads, device=head_BTS.device)).sum(2)
    return order_BTS.argsort(dim=-1) - (rows_BTH.cumsum(-1) - rows_BTH).gather(2, head_BTS)
