"""H2O, arXiv 2306.14048: accumulated attention, and the newest half."""

from typing import ClassVar

from torch import Tensor

from ..base import Slots, Weight
from ..registry import Window, part, register


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
