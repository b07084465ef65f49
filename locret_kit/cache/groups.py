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
    group_BTS: Tensor, leaving_BTS: Tensor, head_BTS: Tensor, heads: int, groups: int, size: int
) -> tuple[Tensor, Tensor]:
    """Where rows go that must be quantised: ``(target [B, T, S], made [B, T, groups])``, for each of ``B * T`` tables.

    A table takes the fewest of its sparsest groups (free ones first) that together have room for their own rows and for
    those that leave the tail, each head's rows in groups of their own, and fills them anew in the order of the rows.
    ``target`` is a row's new group, -1 where it stays as it is; ``made`` says which groups are taken. A table in which no row
    leaves takes none.

    Args:
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
    moved_BTH = moved_BTMH.gather(2, last_BT1[..., None].expand(-1, -1, 1, heads))[:, :, 0]
    first_row_BTH, first_group_BTH = (x.cumsum(-1) - x for x in (moved_BTH, _over(moved_BTH, size)))
    rank_BTS = (chosen_BTS.cumsum(-1) - 1 - first_row_BTH.gather(2, head_BTS)).clamp(min=0)
    place_BTS = first_group_BTH.gather(2, head_BTS) + rank_BTS // size
    target_BTS = order_BTM.gather(2, place_BTS.clamp(max=groups - 1))
    return target_BTS.masked_fill(~chosen_BTS, -1), made_BTM


def _over(rows: Tensor, size: int) -> Tensor:
    """Groups of ``size`` that so many rows need."""
    return (rows + size - 1) // size
