"""How many slots each layer and each head gets. Sums are exact, whatever is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from .base import Ratio, Uniform, rank_of
from .registry import part

WHOLE = 10**6
"""Parts of a slot in which shares are counted on the device."""


@part("allocation", "pyramid")
class Pyramid(Uniform):
    """Low layers get more: layer ``l`` of ``L`` has ``w + hi - l (hi - lo) / (L - 1)`` slots, ``lo = (B - w) / beta`` and
    ``hi = 2 (B - w) - lo``, ``w`` being the protected window. What a short prompt cannot fill of ``hi`` goes to the high
    layers. Rounded down, and what is missing from the sum goes to the largest fractions. Source: PyramidKV, arXiv 2406.02069."""

    beta: Annotated[float, Ge(1)] = 20.0

    def layer_budgets(self, budget: int, layers: int, window: int, longest: int | None = None) -> list[int]:
        free = budget - window
        low = free / Fraction(self.beta)
        if longest is not None:
            low = max(low, Fraction(min(free, 2 * free - (longest - window))))
        step = Fraction(2 * (free - low)) / max(1, layers - 1)
        high = 2 * free - low if layers > 1 else Fraction(free)
        return rounded([window + high - layer * step for layer in range(layers)], layers * budget)


@part("allocation", "adaptive")
class Adaptive(Uniform):
    """The ``H * B`` best slots of a layer's heads together give each head ``B*_h``; it gets
    ``alpha B*_h + (1 - alpha) B``, ``alpha`` to six decimals. Source: Ada-KV, algorithms 2 and 3 (``alpha`` is its
    safeguard)."""

    alpha: Ratio = 0.5
    ragged: ClassVar[bool] = True

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        B, H, S = scores_BHS.shape
        # Slot-major, so that of equal scores the newer slot is the better one, in whatever head.
        together = [x.transpose(1, 2).reshape(B, 1, S * H) for x in (scores_BHS, protected_BHS, valid_BHS)]
        place_BHS = rank_of(*together).view(B, S, H).transpose(1, 2)
        best_BH, held_BH = ((place_BHS < H * keep) & valid_BHS).sum(-1), valid_BHS.sum(-1)
        part = round(self.alpha * WHOLE)
        return rounded_on_device(part * best_BH + (WHOLE - part) * keep, held_BH, H * keep)


@dataclass(frozen=True)
class PyramidAdaptive(Adaptive, Pyramid):
    """Pyramid over layers, then adaptive over the heads of each: ``pyramid(beta)+adaptive(alpha)``.
    Source: Ada-KV, section 4 (Ada-Pyramid)."""


def rounded(shares: list[Fraction], total: int, most: list[int] | None = None) -> list[int]:
    """Integers near ``shares`` whose sum is ``total``: each rounded down, then one more for the largest fractions (of equals,
    the first), none above its ``most``.

    >>> rounded([Fraction(5, 2), Fraction(5, 2), Fraction(1)], 6)
    [3, 2, 1]
    """
    most = [total] * len(shares) if most is None else most
    out = [min(share.__floor__(), top) for share, top in zip(shares, most, strict=True)]
    by_fraction = sorted(range(len(shares)), key=lambda i: out[i] - shares[i])
    while (missing := total - sum(out)) > 0:
        for i in [i for i in by_fraction if out[i] < most[i]][:missing]:
            out[i] += 1
    return out


def rounded_on_device(share_BH: Tensor, most_BH: Tensor, total: int) -> Tensor:
    """``rounded`` of every row ``[B, H]`` (int64), for which the host waits for nothing. Shares are in ``WHOLE``-ths; a row
    sums to ``total``, or to its ``most`` where that is less."""
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
