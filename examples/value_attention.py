"""A policy in one file: attention times the size of the value (VATP, arXiv 2406.12335).

locret-infer long.txt --model checkpoints/SmolLM2-135M-Instruct --plugin examples/value_attention.py --policy value-attention
"""

from typing import ClassVar

from torch import Tensor

from locret_kit.policies.base import Slots, Weight
from locret_kit.policies.registry import Sinks, Window, part, register


@part("score", "value-attention")
class ValueAttention(Weight):
    """Accumulated attention times the L1 norm of the value, to a power."""

    power: float = 1.0
    statistics: ClassVar[frozenset[str]] = frozenset({"sum"})

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``; larger is kept."""
        return slots.stats["sum"] * slots.values().float().abs().sum(-1) ** self.power


register(
    "value-attention",
    "VATP, arXiv 2406.12335",
    {"score": ValueAttention(), "scopes": (Sinks(), Window(0.25))},
    names={"n": "sinks", "size": "window"},
)
