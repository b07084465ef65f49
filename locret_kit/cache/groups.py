"""Which rows share a key group: a table of groups of fixed size, of one head or of all heads of a layer together."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Rows of a key group."""
SPARE = 0.5
"""Groups in the table beyond what full groups need, as a fraction: a full table's groups are then two thirds full on average."""


def table_size(capacity: int, heads: int = 1, spare: float = SPARE, size: int = GROUP) -> int:
    """Groups in a table that ``heads`` share, ``heads * capacity`` rows in whatever parts: at least one for every ``size``
    rows and begun ``size`` of a head."""
    wanted = heads * -(-int(capacity * (1 + spare)) // size)
    return max(wanted, heads + heads * (capacity - 1) // size)


def regroup(
    keys_BTSD: Tensor, group_BTS: Tensor, leaving_BTS: Tensor, head_BTS: Tensor, heads: int, groups: int, size: int
) -> tuple[Tensor, Tensor]:
    """Where rows go that must be quantised: ``(target [B, T, S], made [B, T, groups])``, for each of ``B * T`` tables.

    A table takes the fewest of its sparsest groups (free ones first) that together have room for their own rows and for
    those that leave the tail, each head's rows in groups of their own, and fills them anew, like rows together.
    ``target`` is a row's new group, -1 where it stays as it is; ``made`` says which groups are taken. A table in which no row
    leaves takes none.

    Args:
        keys_BTSD: what a row's likeness is judged by.
        group_BTS: int64, the group of each row, -1 where it is not quantised; no group has rows of two heads.
        leaving_BTS: bool, the rows to quantise, none of which has a group.
        head_BTS: int64, ascending, the head of each row among the ``heads`` that share the table.
        groups: groups of a table, enough for the rows with a group and those that leave (see ``table_size``).
        size: rows of a full group.
    """
    held_BTS = group_BTS >= 0
    own_BTS = group_BTS.clamp(min=0)
    rows_BTMH = torch.zeros(*group_BTS.shape[:2], groups * heads, dtype=torch.int64, device=group_BTS.device)
    rows_BTMH.scatter_add_(2, own_BTS * heads + head_BTS, held_BTS.long())
    rows_BTMH = rows_BTMH.unflatten(-1, (groups, heads))
    order_BTM = rows_BTMH.sum(-1).argsort(dim=-1, stable=True)
    entering_BTH = torch.zeros_like(rows_BTMH[:, :, 0]).scatter_add_(2, head_BTS, leaving_BTS.long())

    # Rows of each head to group anew where the M sparsest groups are taken, and the groups that these then need.
    moved_BTMH = rows_BTMH.gather(2, order_BTM[..., None].expand_as(rows_BTMH)).cumsum(2) + entering_BTH[:, :, None]
    needed_BTM = _over(moved_BTMH, size).sum(-1)
    number_M = torch.arange(groups, device=group_BTS.device)
    any_BT1 = entering_BTH.sum(-1, keepdim=True) > 0
    last_BT1 = (needed_BTM > number_M + 1).sum(-1, keepdim=True)
    made_BTM = torch.zeros_like(order_BTM, dtype=torch.bool).scatter_(2, order_BTM, (number_M <= last_BT1) & any_BT1)

    chosen_BTS = leaving_BTS | (held_BTS & made_BTM.gather(2, own_BTS))
    needed_BTH = _over(moved_BTMH.gather(2, last_BT1[..., None].expand(-1, -1, 1, heads))[:, :, 0], size)
    first_group_BTH = needed_BTH.cumsum(-1) - needed_BTH
    rank_BTS = rank_alike(keys_BTSD, chosen_BTS, head_BTS, heads)
    place_BTS = first_group_BTH.gather(2, head_BTS) + rank_BTS // size
    target_BTS = order_BTM.gather(2, place_BTS.clamp(max=groups - 1))
    return target_BTS.masked_fill(~chosen_BTS, -1), made_BTM


def rank_alike(keys_BTSD: Tensor, chosen_BTS: Tensor, head_BTS: Tensor, heads: int) -> Tensor:
    """Ranks ``[B, T, S]`` of the chosen rows of each head, in which neighbours are alike; other rows rank behind them.

    The order is that along one direction, the covariance of all channels with the one that varies most: the first step towards
    the rows' first principal component.
    """
    all_BTSH = head_BTS[..., None] == torch.arange(heads, device=head_BTS.device)
    of_BTSH = (all_BTSH & chosen_BTS[..., None]).to(keys_BTSD.dtype)
    by_BTHS = of_BTSH.transpose(-1, -2)
    y_BTSD = keys_BTSD - of_BTSH @ (by_BTHS @ keys_BTSD / by_BTHS.sum(-1, keepdim=True).clamp(min=1))
    widest_BTH = (by_BTHS @ y_BTSD.square()).argmax(-1)
    direction_BTHD = by_BTHS @ (y_BTSD * y_BTSD.gather(3, widest_BTH.gather(2, head_BTS)[..., None]))
    place_BTS = (y_BTSD * (of_BTSH @ direction_BTHD)).sum(-1).masked_fill(~chosen_BTS, float("inf"))

    order_BTS = place_BTS.argsort(dim=-1, stable=True)
    order_BTS = order_BTS.gather(2, head_BTS.gather(2, order_BTS).argsort(dim=-1, stable=True))
    rank_BTS = order_BTS.argsort(dim=-1)
    rows_BTH = all_BTSH.sum(2)
    return rank_BTS - (rows_BTH.cumsum(-1) - rows_BTH).gather(2, head_BTS)


def _over(rows: Tensor, size: int) -> Tensor:
    """Groups of ``size`` that so many rows need."""
    return (rows + size - 1) // size
