"""What the end of the prompt, and the answer, attend to: some of the kept slots, or the passages that these point to."""

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


@dataclass(frozen=True)
class Reread:
    """The tail of the prompt, which is held back, is read over every slot; then the cache is emptied, and the ``tokens`` of
    the text that the tail asked for are read once more, and the tail behind them: kept slots are an index to the text.

    A token's score is its share of the attention of the newest ``window`` queries among the older slots of a head, the most
    that any head of any layer gives it, then the maximum over ``kernel`` neighbouring tokens. The ``first`` tokens (a
    template's head, an instruction, the sinks of attention) do not count among the slots, and are read again in any case. What
    is read again stands side by side, and nothing is evicted from it, so the answer does not come through a context with gaps;
    what was not asked for is gone. A prompt that fits the budget is read once.

    Source: to read again what attention points to, from token ids, is InfiniRetri's (arXiv 2502.12962; last layer,
    sentences); from the slots that a policy keeps, and by the most of all heads, is this project's
    (``checkpoints/smollm2-135m-locret/LOG.md``).
    """

    tokens: int = 512
    """Tokens of the text that are read again, at most half of the smallest layer's budget."""
    window: int = 32
    """Queries; all of the tail's where it has fewer."""
    kernel: int = 33
    """Tokens; 1 does not pool."""
    first: int = 32
    """Tokens, at most half of those that are read again."""

    def __post_init__(self) -> None:
        check_size("reread", "tokens", self.tokens, 1)
        check_window("reread", self.window, self.kernel)
        if self.first < 0:
            raise ValueError(f"reread(first={self.first}): first must be at least 0")

    def size(self, budget: int, tail: int) -> int:
        """Tokens that are read before the ``tail``, at least one."""
        return max(1, min(self.tokens, budget // 2, budget - tail))

    def collect(self, score_P: Tensor, slots: Slots, tail: int, size: int) -> None:
        """Raise the scores of a text's tokens ``[P]``, in place, to what the heads of a layer give them; ``size`` of them are
        to be read again."""
        asked_BHS = recent_attention(slots, min(self.window, tail))
        text_BHS = slots.valid & (slots.positions >= self._opening(size)) & (slots.positions < len(score_P))
        asked_BHS = asked_BHS.masked_fill(~text_BHS, 0)
        share_BHS = asked_BHS / asked_BHS.sum(-1, keepdim=True).clamp(min=torch.finfo(asked_BHS.dtype).tiny)
        at_BHS = slots.positions.long().masked_fill(~text_BHS, 0)
        score_P.scatter_reduce_(0, at_BHS.flatten(), share_BHS.flatten().to(score_P.dtype), "amax")

    def choose(self, score_P: Tensor, size: int) -> Tensor:
        """The ``size`` tokens, ascending; of those that are worth the same the earlier ones."""
        pooled_P = F.max_pool1d(score_P[None, None], self.kernel, stride=1, padding=self.kernel // 2)[0, 0]
        pooled_P[: self._opening(size)] = float("inf")
        return pooled_P.argsort(descending=True, stable=True)[:size].sort().values

    def _opening(self, size: int) -> int:
        return min(self.first, size // 2)
