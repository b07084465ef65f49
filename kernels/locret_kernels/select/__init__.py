"""The best rows of each head by score, protected rows first, as marks or as an index, by a stable sort; and their move to the
front of their buffers, in place. The definitions, in torch."""

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from .. import check_keep, check_some

__all__ = ["compact_rows", "select_index", "select_rows"]


def rank_of(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor) -> Tensor:
    """Place ``[B, H, S]`` (int64, 0 is the best) of every slot in its head: protected first, then by score, ties to the
    newer slot, padding last. So runs repeat exactly. Infinities count as the type's largest numbers, NaN as the best of all."""
    lowest = torch.finfo(scores_BHS.dtype).min
    keys_BHS = scores_BHS.clamp(min=lowest, max=-lowest).masked_fill(protected_BHS, float("inf"))
    keys_BHS = keys_BHS.masked_fill(~valid_BHS, float("-inf"))
    worst_first_BHS = keys_BHS.argsort(dim=-1, stable=True)  # of equals the older one, which is then the worse
    place_S = torch.arange(keys_BHS.shape[-1] - 1, -1, -1, device=keys_BHS.device).expand_as(worst_first_BHS)
    return torch.empty_like(worst_first_BHS).scatter_(-1, worst_first_BHS, place_S)


def select_rows(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, most_BH: Tensor) -> Tensor:
    """Boolean ``[B, H, S]``: the ``most`` rows of each head that ``rank_of`` places first; all of them where there are fewer.

    Raises:
        ValueError: no rows, or shapes that do not fit each other.
    """
    check_scores(scores_BHS, protected_BHS, valid_BHS, most_BH)
    return rank_of(scores_BHS, protected_BHS, valid_BHS) < most_BH[..., None]


def select_index(scores_BHS: Tensor, keep: int, newest: int = 0, guard_BHS: Tensor | None = None) -> Tensor:
    """Row indices ``[B, H, keep]`` (ascending integers) of the rows of each head that ``rank_of`` places first.

    Args:
        newest: rows at the end of every head that are protected. guard_BHS: uint8, 1 protects too; 2 is above all that is
            protected, and NaN.

    Raises:
        ValueError: ``keep`` outside ``1..S``.
    """
    S = scores_BHS.shape[-1]
    check_keep(keep, S)
    guard_BHS = torch.zeros_like(scores_BHS, dtype=torch.uint8) if guard_BHS is None else guard_BHS
    protected, pinned = (torch.arange(S, device=guard_BHS.device) >= S - newest) | (guard_BHS > 0), guard_BHS > 1
    return kept_rows(select_rows(scores_BHS, protected, ~pinned, keep - pinned.sum(-1)) | pinned, keep)


def kept_rows(stay_BHS: Tensor, keep: int) -> Tensor:
    """Row indices ``[B, H, keep]`` (int64, ascending) of a boolean with ``keep`` True in each head."""
    place_BHS = (stay_BHS.cumsum(-1) - 1).masked_fill_(~stay_BHS, keep)  # the others share one place after them
    row_S = torch.arange(place_BHS.shape[-1], device=place_BHS.device).expand_as(place_BHS)
    return place_BHS.new_empty(*place_BHS.shape[:-1], keep + 1).scatter_(-1, place_BHS, row_S)[..., :keep]


def check_scores(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, most_BH: Tensor) -> None:
    """Raise ValueError unless there are rows, every one with a score and two marks, and a number of each head."""
    check_some("scores", scores_BHS.numel(), "rows")
    for name, x in {"protected": protected_BHS, "valid": valid_BHS}.items():
        if x.shape != scores_BHS.shape:
            raise ValueError(f"{name} {tuple(x.shape)} must have the shape of scores {tuple(scores_BHS.shape)}")
    if most_BH.shape != scores_BHS.shape[:2]:
        raise ValueError(f"most {tuple(most_BH.shape)} must be {tuple(scores_BHS.shape[:2])}, a number of each head")


Addresses = MutableMapping[tuple[int, ...], Tensor]
"""Tables on the device of the addresses where buffers begin, keyed by their contents."""


def compact_rows(buffers: Sequence[Sequence[Tensor]], index_LHK: Tensor, addresses: Addresses | None = None) -> None:
    """Move row ``index[j]`` of every buffer ``[H, S]`` or ``[H, S, D]`` of a layer to row ``j``, for ``j < K``, in place.

    ``index`` ascends, so rows keep their order; rows from ``K`` on are left as they are.

    Args:
        buffers: of each layer, one layer's after another's.
        addresses: tables that were made for earlier calls; kernels add theirs.

    Raises:
        ValueError: ``K`` outside ``1..S``.
    """
    for layer, index_HK in zip(buffers, index_LHK.long(), strict=True):
        for rows in layer:
            check_keep(index_HK.shape[1], rows.shape[1])
            index = index_HK if rows.dim() == 2 else index_HK[..., None].expand(-1, -1, rows.shape[-1])
            rows[:, : index.shape[1]] = torch.gather(rows, 1, index)
