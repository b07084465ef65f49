"""Which of the kept slots the end of the prompt, and the answer, attend to."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F

from .allocation import rounded
from .base import Slots, amount, rank_of
from .scores import check_size, check_window, recent_attention


@dataclass(frozen=True)
class Focus:
    """The tail of the prompt, which is held back, is read twice. The first time it sees every slot, and the attention of its
    newest ``window`` queries, summed, then the maximum over ``kernel`` neighbouring slots, says which ``slots`` of a head
    stay; the tail is then read once more over these, and the answer sees no others either. A prompt that fits the budget is
    read once.

    What a text is read for is known when its question has been read. Until then slots must be kept on suspicion, and a small
    backbone that then looks through thousands of them loses the few that it was asked for. Source: the score is SnapKV's,
    arXiv 2404.14469; keeping by importance before the question, choosing by the question, and reading it again is this
    project's (``checkpoints/smollm2-135m-locret/LOG.md``).
    """

    slots: int | float = 0.25
    """Slots a head that stay beside the tail: a number, or a fraction of the layer's budget; the mean where heads differ."""
    window: int = 32
    """Queries; all of the tail's where it has fewer."""
    kernel: int = 33
    """Slots; 1 does not pool."""

    def __post_init__(self) -> None:
        check_size("focus", "slots", self.slots, 1)
        check_window("focus", self.window, self.kernel)

    def size(self, budget: int, tail: int) -> int:
        """Slots a head of a layer with ``budget`` that stay beside the ``tail``, at least one."""
        return max(1, min(amount(self.slots, budget), budget - tail))

    def choose(self, slots: Slots, tail: int, held: int) -> Tensor:
        """Boolean ``[B, H, S]``: the slots that stay, ``slots.keep`` of the ``held`` that a head has beside the tail; where heads
        hold different numbers the same share of each. The newest ``tail`` slots have asked and go."""
        asked_BHS = recent_attention(slots, min(self.window, tail))
        older_BHS = slots.valid & ~slots.newest(tail)
        asked_BHS = asked_BHS.masked_fill(~older_BHS, float("-inf"))
        pooled_BHS = F.max_pool1d(asked_BHS, self.kernel, stride=1, padding=self.kernel // 2)
        place_BHS = rank_of(pooled_BHS, torch.zeros_like(older_BHS), older_BHS)
        if not slots.ragged:
            return older_BHS & (place_BHS < slots.keep)
        keep_BH = [
            rounded([Fraction(n * slots.keep, held) for n in row], slots.keep * len(row), row)
            for row in older_BHS.sum(-1).tolist()
        ]
        return older_BHS & (place_BHS < torch.tensor(keep_BH, device=place_BHS.device)[..., None])
