"""RoCo, arXiv 2402.06262: mean attention; slots whose attention varies most are safe."""

from typing import ClassVar

import torch
from torch import Tensor

from ..base import Count, Scope, Size, Slots, Weight, best_of, resolve_count, wanted_count
from ..registry import part, register


@part("score", "mas")
class Mas(Weight):
    """Mean attention: ``sum of a / count``, ``count`` queries having seen the slot. Source: RoCo, section 4."""

    statistics: ClassVar[frozenset[str]] = frozenset({"sum", "count"})

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: mean attention."""
        return slots.stats["sum"] / slots.stats["count"]


@part("scope", "deviation")
class Deviation(Scope):
    """The ``size`` slots of highest standard deviation ``sqrt(sum a^2 / count - (sum a / count)^2)``. A slot that few queries
    have seen has no spread to speak of, so the newest slots and the sinks come first, whatever theirs.
    Source: RoCo, section 4; the two exceptions are its published implementation's."""

    size: Size = 0.5
    """Number of slots, or a fraction of the slots a head keeps; the exceptions are included."""
    newest: Count = 10
    sinks: Count = 4
    statistics: ClassVar[frozenset[str]] = frozenset({"sum", "square", "count"})

    def reserved(self, budget: int, chunk: int, stabilizers: int) -> int:
        return wanted_count(self.size, budget)

    def protects(self, slots: Slots) -> Tensor:
        """Boolean ``[B, H, S]``: the slots of highest deviation."""
        mean_BHS = slots.stats["sum"] / slots.stats["count"]
        variance_BHS = slots.stats["square"] / slots.stats["count"] - mean_BHS.square()
        first_BHS = slots.newest(self.newest) | ((slots.positions < self.sinks) & slots.valid)
        most_BH = slots.valid.new_full(slots.valid.shape[:2], resolve_count(self.size, slots.keep), dtype=torch.int64)
        deviation_BHS = variance_BHS.clamp_(min=0).sqrt_()
        return best_of(deviation_BHS, first_BHS, slots.valid, most_BH, slots.backend) & slots.valid


register(
    "roco",
    "RoCo, arXiv 2402.06262",
    {"score": Mas(), "scopes": (Deviation(),)},
    names={"size": "window"},
    keeps="mean attention; slots whose attention varies most are safe",
)
