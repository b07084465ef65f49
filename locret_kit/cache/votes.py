"""What recall remembers beside the stores: its work on a text, and what the layers of a forward gave to blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RecallCounters:
    """Work of recall on one text. Seconds are host time."""

    lookups: int = 0
    """Of all layers."""
    blocks: int = 0
    """Blocks of a head that came back."""
    hits: int = 0
    """Those of them that were on the device already."""
    loaded_bytes: int = 0
    stored_slots: int = 0
    recall_s: float = 0.0

    def clear(self) -> None:
        """Back to zero, for another text."""
        vars(self).update(vars(RecallCounters()))


class Votes:
    """What the layers of one forward gave to the blocks: the most of any layer so far, for each piece of the forward."""

    def __init__(self) -> None:
        self._most: dict[tuple[int, int], Tensor] = {}

    def clear(self) -> None:
        """Forget those of the last forward."""
        self._most.clear()

    def raised(self, start: int, tokens: int, worth_B1N: Tensor) -> Tensor:
        """The most that a layer up to this one gave to each block, for ``tokens`` tokens from ``start`` on."""
        before = self._most.get((start, tokens))
        if before is not None:
            few, many = sorted(
                (before, worth_B1N), key=lambda x: x.shape[-1]
            )  # blocks that only some layers have stored
            worth_B1N = torch.cat((torch.maximum(few, many[..., : few.shape[-1]]), many[..., few.shape[-1] :]), -1)
        # Later layers see what earlier ones gave, in one forward alone: it is cleared at its beginning.
        self._most[start, tokens] = worth_B1N
        return worth_B1N
