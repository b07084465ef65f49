"""Whole numbers of slots from shares. Sums are exact, whatever is rounded."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F

WHOLE = 10**6
"""Parts of a slot in which shares are counted on the device."""


def rounded(shares: list[Fraction], total: int, max_shares: list[int] | None = None) -> list[int]:
    """Integers near ``shares`` whose sum is ``total``: each rounded down, then one more for the largest fractions (of equals,
    the first), none above its ``max_shares``.

    >>> rounded([Fraction(5, 2), Fraction(5, 2), Fraction(1)], 6)
    [3, 2, 1]
    """
    max_shares = [total] * len(shares) if max_shares is None else max_shares
    out = [min(share.__floor__(), top) for share, top in zip(shares, max_shares, strict=True)]
    by_fraction = sorted(range(len(shares)), key=lambda i: out[i] - shares[i])
    while (missing := total - sum(out)) > 0:
        for i in [i for i in by_fraction if out[i] < max_shares[i]][:missing]:
            out[i] += 1
    return out


def rounded_on_device(share_BH: Tensor, most_BH: Tensor, total: int | Tensor) -> Tensor:
    """``rounded`` of every row ``[B, H]`` (int64), for which the host waits for nothing. Shares are in ``WHOLE``-ths; a row
    sums to ``total`` (an integer, or ``[B]``), or to its ``max_shares`` where that is less."""
    H = share_BH.shape[1]
    down_BH = (share_BH // WHOLE).minimum(most_BH)
    turn_BH = (share_BH - WHOLE * down_BH).argsort(dim=-1, descending=True, stable=True)
    room_BH = (most_BH - down_BH).gather(1, turn_BH)
    missing_B1 = (most_BH.sum(-1).clamp(max=total) - down_BH.sum(-1))[:, None]
    # In a round every head that has room gets one. How many are given until k heads are full, and the last such k:
    low_BK = F.pad(room_BH.sort(dim=-1).values, (1, 0))
    left_K = torch.arange(H, -1, -1, device=share_BH.device)
    given_BK = low_BK.cumsum(-1) + left_K * low_BK
    k_B1 = (given_BK <= missing_B1).sum(-1, keepdim=True) - 1
    rounds_B1 = low_BK.gather(1, k_B1) + (missing_B1 - given_BK.gather(1, k_B1)) // left_K[k_B1].clamp(min=1)
    more_BH = room_BH.minimum(rounds_B1)
    open_BH = room_BH > rounds_B1
    more_BH = more_BH + (open_BH & (open_BH.cumsum(-1) <= missing_B1 - more_BH.sum(-1, keepdim=True)))
    return down_BH.scatter_add(1, turn_BH, more_BH)


def raised(budgets_BH: Tensor, least_BH: Tensor) -> Tensor:
    """Budgets ``[B, H]`` (int64) of which each is at least ``least``; rows keep their sums, which are at least those of
    ``least``. What some heads lack, the others give in proportion to what they have above theirs."""
    spare_BH = (budgets_BH - least_BH).clamp(min=0)
    total_B, spare_B1 = (budgets_BH - least_BH).sum(-1), spare_BH.sum(-1, keepdim=True).clamp(min=1)
    # Whole slots and the rest apart: all three factors together would leave 64 bits at 32 heads of 500,000 slots.
    whole_BH, rest_BH = spare_BH * total_B[:, None] // spare_B1, spare_BH * total_B[:, None] % spare_B1
    return least_BH + rounded_on_device(whole_BH * WHOLE + rest_BH * WHOLE // spare_B1, spare_BH, total_B)
