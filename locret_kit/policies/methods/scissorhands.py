"""ScissorHands, arXiv 2305.17118: how often attention was above average, and the newest half."""

from typing import ClassVar

from torch import Tensor

from ..base import Slots, Weight
from ..registry import Window, part, register


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
