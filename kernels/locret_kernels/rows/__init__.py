"""Rows of a cache: entry of new tokens, the choice of those that stay, and their move to the front. The definitions, in torch.

New tokens enter with key, value, position, score and zero statistics. The best rows of each head stay by score, protected rows
first, as marks or as an index, by a stable sort. They move to the front of their buffers in place.
"""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check_keep, check_some
from ..quantise import row_codes

__all__ = ["compact_rows", "enter_rows", "select_index", "select_rows"]


# ---- entry ----------------------------------------------------------------------------------------------------------


class RowBuffers(NamedTuple):
    """Rows of all heads, end to end; each buffer is contiguous, of the statistics each kind."""

    keys_ND: Tensor
    values_ND: Tensor
    positions_N: Tensor
    scores_N: Tensor
    """Float32, and so are the statistics."""
    stats_XN: Tensor
    levels: Sequence[Tensor] = ()
    """Steps and zero points of keys, then those of values (float16 ``[N, C]`` for ``C`` groups of channels), where both are codes
    in 8 bits (``quantise.row_codes``)."""


class HeadProduct(NamedTuple):
    """Scores of new tokens by the second product of a retaining head, ``fc2 silu(hidden)``."""

    hidden_BTR: Tensor
    """The first product, before the activation."""
    fc2_HR: Tensor

    def scores(self) -> Tensor:
        """Scores ``[B, H, T]`` (float32), rounded to the type of the products as PyTorch rounds them."""
        return F.linear(F.silu(self.hidden_BTR), self.fc2_HR).transpose(1, 2).float()


Score = Tensor | HeadProduct | None
"""Scores ``[1, H, T]``, the products that make them, or zeros."""


def enter_rows(
    rows: RowBuffers, at: int | Tensor, k_HTD: Tensor, v_HTD: Tensor, seen: int | Tensor, score: Score, *, apart: int = 0
) -> None:  # fmt: skip
    """Write the rows of new tokens, in place.

    Args:
        at: row of the first token in the first head, in the next ones ``apart`` rows on; or each one's ``[H, T]``. Tensors lie
            on the device.
        seen: position of the first token; or each one's ``[T]``.

    Raises:
        ValueError: no tokens.
    """
    H, T, _ = k_HTD.shape
    check_some("k", T, "tokens")
    new_T = torch.arange(T, device=k_HTD.device)
    if isinstance(at, int) or at.dim() < 2:
        at = at + new_T + apart * torch.arange(H, device=k_HTD.device)[:, None]
    for n, (buffer, x) in enumerate(((rows.keys_ND, k_HTD), (rows.values_ND, v_HTD))):
        if rows.levels:
            step, zero = rows.levels[2 * n : 2 * n + 2]
            x, step[at], zero[at] = row_codes(x, x.shape[-1] // step.shape[1])
        buffer[at] = x.to(buffer.dtype)
    each = isinstance(seen, Tensor) and seen.dim() > 0
    rows.positions_N[at] = (seen if each else seen + new_T).to(rows.positions_N.dtype)  # type: ignore[union-attr]
    zero = rows.stats_XN.new_zeros(())  # a number of the host would be copied
    given = score.scores() if isinstance(score, HeadProduct) else score
    rows.scores_N[at] = zero if given is None else given[0].to(zero.dtype)
    rows.stats_XN[:, at] = zero


# ---- choice and move ------------------------------------------------------------------------------------------------


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
