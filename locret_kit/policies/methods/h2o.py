"""Sums of attention, under RoCo's names: H2O, arXiv 2306.14048 (accumulated attention, and the newest half); ScissorHands, arXiv
2305.17118 (how often attention was above average, and the newest half); TOVA, arXiv 2401.06104 (attention of the newest query);
RoCo, arXiv 2402.06262 (mean attention; slots whose attention varies most are safe)."""

from typing import ClassVar

import torch
from torch import Tensor

from ..base import Count, Scope, Size, Slots, Weight, best_of, resolve_count, wanted_count
from ..registry import Window, part, register
from ..slots import recent_attention


@part("score", "aas")
class Aas(Weight):
    """Accumulated attention: ``sum of a`` over every query since the slot entered. Source: H2O, arXiv 2306.14048."""

    statistics: ClassVar[frozenset[str]] = frozenset({"sum"})

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: the sum of attention so far."""
        return slots.stats["sum"]


register(
    "h2o",
    "H2O, arXiv 2306.14048",
    {"score": Aas(), "scopes": (Window(),)},
    names={"size": "window"},
    keeps="summed attention, and the newest half",
)


@part("score", "aqas")
class Aqas(Weight):
    """Number of queries that gave the slot more than ``1 / n``, ``n`` slots being visible to the query. Source: ScissorHands,
    arXiv 2305.17118."""

    statistics: ClassVar[frozenset[str]] = frozenset({"above"})

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: number of queries with attention above the mean."""
        return slots.stats["above"]


register(
    "scissorhands",
    "ScissorHands, arXiv 2305.17118",
    {"score": Aqas(), "scopes": (Window(),)},
    names={"size": "window"},
    keeps="how often its attention was above average, and the newest half",
)


@part("score", "ltas")
class Ltas(Weight):
    """Attention of the last token, in each head for itself (RoCo, section 4.1); the code of its authors takes the mean over all
    heads of a layer, which then keep the same slots. Source: TOVA, arXiv 2401.06104."""

    def recent(self, chunk: int) -> int:
        return 1

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: attention of the newest query."""
        return recent_attention(slots, 1)


register("tova", "TOVA, arXiv 2401.06104", {"score": Ltas()}, keeps="the newest query's attention")


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
