"""Numbers of slots of each layer and each head."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from .base import Ratio, Score, Slots, Uniform, rank_of
from .policy import WHOLE, rounded, rounded_on_device
from .registry import part


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
        return shared_out(scores_BHS, protected_BHS, valid_BHS, keep, self.alpha)


@part("allocation", "mass")
class Mass(Uniform):
    """Every head of a layer keeps the same share of its attention, as few slots as that takes, ``H * B`` of them together:
    ``B*_h``; it gets ``alpha B*_h + (1 - alpha) B``. What counts as attention is the score's ``log_weight``, so a score that is
    none shares out alike. Source: the code of IndexMem++ (arXiv 2605.25475), which finds the share by bisection."""

    alpha: Ratio = 1.0
    ragged: ClassVar[bool] = True

    def measured(self, score: Score, scores_BHS: Tensor, slots: Slots) -> Tensor:
        weight_BHS = score.log_weight(scores_BHS).masked_fill(~slots.valid, float("-inf"))
        return weight_BHS.double().softmax(-1).nan_to_num()

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        place_BHS = rank_of(scores_BHS, protected_BHS, valid_BHS)
        sorted_BHS = torch.empty_like(scores_BHS).scatter_(-1, place_BHS, scores_BHS.masked_fill(~valid_BHS, 0.0))
        # A slot is wanted before all that stand behind a larger share of their own head.
        before_BHS = (sorted_BHS.cumsum(-1) - sorted_BHS).gather(-1, place_BHS)
        return shared_out(-before_BHS, protected_BHS, valid_BHS, keep, self.alpha)


def shared_out(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int, alpha: float) -> Tensor:
    """Slots ``[B, H]`` of each head, where the ``H * keep`` best slots of all heads give ``alpha`` of them, and ``keep`` for
    each the rest; ``alpha`` to six decimals."""
    B, H, S = scores_BHS.shape
    # Slot-major, so that of equal scores the newer slot is the better one, in whatever head.
    together = [x.transpose(1, 2).reshape(B, 1, S * H) for x in (scores_BHS, protected_BHS, valid_BHS)]
    place_BHS = rank_of(*together).view(B, S, H).transpose(1, 2)
    best_BH, held_BH = ((place_BHS < H * keep) & valid_BHS).sum(-1), valid_BHS.sum(-1)
    part = round(alpha * WHOLE)
    return rounded_on_device(part * best_BH + (WHOLE - part) * keep, held_BH, H * keep)


@dataclass(frozen=True)
class PyramidAdaptive(Adaptive, Pyramid):
    """Pyramid over layers, then adaptive over the heads of each: ``pyramid(beta)+adaptive(alpha)``.
    Source: Ada-KV, section 4 (Ada-Pyramid)."""
