"""Reuse of freed rows: the definitions, in torch.

A head's slots are numbered by age, and its rows by where they lie. ``row_BHC`` says in which row a slot lies, and ``slot_BHC``
which slot lies in a row: two permutations, each the other's inverse. An eviction leaves the first ``keep`` rows in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_reuse


def reuse_rows(stay_BHS: Tensor, row_BHC: Tensor, slot_BHC: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Which rows move, ``source`` and ``target`` ``[B, H, M]`` (int32), so that the ``keep`` slots that stay lie in the first
    ``keep`` rows of their head: the slots beyond them take the rows of those that go, both in order of age. ``M`` is what may
    move at most; where less does, -1 follows. Both permutations are brought up to date in place; slots and rows from ``keep``
    on are then each other's.

    Args:
        stay_BHS: bool with ``keep`` True in each head, by slot. The first ``S`` slots lie in the first ``S`` rows.
        row_BHC: int16 or int32, and so is ``slot_BHC``.

    Raises:
        ValueError: ``keep`` outside ``1..S``, or shapes that do not fit each other.
    """
    check_reuse(stay_BHS, row_BHC, slot_BHC, keep)
    S = stay_BHS.shape[-1]
    most = min(keep, S - keep)
    here_BHS = row_BHC[..., :S].int()
    moves_BHS, frees_BHS = stay_BHS & (here_BHS >= keep), ~stay_BHS & (here_BHS < keep)
    source_BHM, target_BHM = (_listed(here_BHS, chosen, most) for chosen in (moves_BHS, frees_BHS))
    if most:
        nth_BHS = (moves_BHS.cumsum(-1) - 1).clamp(0, most - 1)
        here_BHS = torch.where(moves_BHS, target_BHM.gather(-1, nth_BHS), here_BHS)
    row_BHC[..., :keep] = _listed(here_BHS, stay_BHS, keep)
    number_C = torch.arange(row_BHC.shape[-1], dtype=row_BHC.dtype, device=row_BHC.device)
    row_BHC[..., keep:] = number_C[keep:]
    slot_BHC.scatter_(-1, row_BHC.long(), number_C.expand_as(row_BHC))
    return source_BHM, target_BHM


def _listed(x_BHS: Tensor, chosen_BHS: Tensor, most: int) -> Tensor:
    """The chosen ones of ``x``, at most ``most``, in order ``[B, H, most]``; -1 after them."""
    place_BHS = (chosen_BHS.cumsum(-1) - 1).masked_fill(~chosen_BHS, most)  # the others share one place after them
    return x_BHS.new_full((*x_BHS.shape[:2], most + 1), -1).scatter_(-1, place_BHS, x_BHS)[..., :most]


def move_rows(buffers: Sequence[Tensor], source_BHM: Tensor, target_BHM: Tensor) -> None:
    """Copy row ``source[m]`` of every buffer ``[B, H, C]`` or ``[B, H, C, D]`` to row ``target[m]``, in place, where ``source``
    is not -1. No source is a target, and no row the target of two."""
    for rows in buffers:
        for head, source_M, target_M in zip(
            rows.flatten(0, 1), source_BHM.flatten(0, 1), target_BHM.flatten(0, 1), strict=True
        ):
            some_M = source_M >= 0
            head[target_M[some_M].long()] = head[source_M[some_M].long()]
