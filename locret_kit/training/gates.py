"""Evictions with gradients: while a text is read in chunks, scores hide what a budget would not keep."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..backbones.handler import Handler, Softmax
from ..backbones.rope import Rope, rotated_text
from ..backbones.spec import AttentionLayer
from ..cache.attend import attend_rows, attend_text
from ..heads import RetainingHeads

HALVINGS = 40
"""Halvings of the interval that holds a threshold."""


def threshold(scores_XS: Tensor, keep: int, temperature: float) -> Tensor:
    """The threshold ``[X, 1]`` at which the gates ``sigmoid((s - threshold) / temperature)`` of each row sum to ``keep``.

    Its gradient is that of the implicit equation, so a gate can only open as far as others close. Source: the constraint of a
    soft top-k (SOFT, arXiv 2002.06504, and its successors) with a sigmoid for each element.

    Raises:
        ValueError: ``keep`` is not at least 1 and below the number of elements.
    """
    S = scores_XS.shape[-1]
    if not 1 <= keep < S:
        raise ValueError(f"keep={keep} must be at least 1 and below the {S} elements")
    with torch.no_grad():
        s = scores_XS.double()
        edge = temperature * (
            math.log(S) + 1
        )  # one gate of S alone gives more than S - 1/e, or less than 1/e, beyond it
        low, high = s.amin(-1, keepdim=True) - edge, s.amax(-1, keepdim=True) + edge
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            many = ((s - middle) / temperature).sigmoid().sum(-1, keepdim=True) > keep
            low, high = torch.where(many, middle, low), torch.where(many, high, middle)
        cut = ((low + high) / 2).to(scores_XS.dtype)
        open_XS = ((scores_XS - cut) / temperature).sigmoid()
        slope_XS = open_XS * (1 - open_XS)
        share_XS = slope_XS / slope_XS.sum(-1, keepdim=True).clamp_min(1e-12)
    moved = (share_XS * scores_XS).sum(-1, keepdim=True)
    return cut + moved - moved.detach()


@dataclass(frozen=True)
class Eviction:
    """A bounded reading of a text: which chunks, and what of the slots before each is kept."""

    bounds: tuple[int, ...]
    """First token of every chunk, 0 first, and the end of the text."""
    keep: int
    """Slots of the history that the scores choose."""
    newest: int
    """Newest slots of the history, which stay whatever they score."""
    temperature: float
    """Difference of scores over which a gate opens, in their unit."""

    @property
    def first(self) -> int:
        """The first token that sees a history with gates; the end of the text where there is none."""
        return next((a for a in self.bounds[:-1] if a - self.newest > self.keep), self.bounds[-1])


def drawn_eviction(
    rng: random.Random,
    tokens: int,
    prompt: int,
    *,
    share: Sequence[float],
    chunks: Sequence[int],
    newest: float,
    tail: int,
    temperature: float,
) -> Eviction:
    """An eviction for a text of so many tokens, of which the first ``prompt`` are the prompt: the budget, chunk, offset of the
    text against the chunks and newest slots are drawn.

    Args:
        share: least and largest part of the prompt that is kept; uniform in its logarithm. chunks: sizes, one is drawn.
        newest: largest part of the budget that the newest slots take. tail: last tokens of the prompt, which are read after the
            last eviction; less where the prompt has fewer than twice as many.
    """
    budget = max(2, round(prompt * math.exp(rng.uniform(math.log(share[0]), math.log(share[1])))))
    recent = round(budget * rng.uniform(0, newest))
    chunk = rng.choice(chunks)
    last = prompt - min(tail, prompt // 2)
    starts = range(rng.randint(1, chunk), last, chunk)
    return Eviction((0, *starts, last, tokens), max(1, budget - recent), recent, temperature)


class Gated(Handler):
    """Attention in which a chunk sees the slots before it through gates, and itself whole.

    For each chunk a head's gates sum to ``keep`` over the history without its ``newest`` slots, and multiply what the slots
    weigh. Scores come from each token's own q, k, v, whose gradient is not taken: weights of the heads alone learn. Layers with a
    window are as they are, and positions are the text's own.

    Args:
        hard: evicts forward, and is soft backward alone (a straight-through estimate). A soft forward can be fooled: scores that
            are alike leave every gate a little open.
    """

    wants_unrotated = True

    def __init__(
        self,
        heads: RetainingHeads,
        ropes: list[Rope],
        layers: Sequence[AttentionLayer],
        eviction: Eviction,
        *,
        hard: bool,
    ) -> None:
        self.heads, self.ropes, self.layers, self.eviction, self.hard = heads, ropes, layers, eviction, hard

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        q_rot, k_rot = rotated_text(self.ropes[layer], q_BQTD, k_BHTD)
        if self.layers[layer].window is not None:
            return attend_text(q_rot, k_rot, v_BHTD, softmax, self.layers[layer])
        if not softmax.is_plain:
            raise ValueError("attention through gates knows no sinks and no cap on logits: train with another target")
        scores_BHT = self.heads[layer](q_BQTD.detach(), k_BHTD.detach(), v_BHTD.detach())
        out: Tensor = checkpoint(self._chunks, q_rot, k_rot, v_BHTD, scores_BHT, softmax.scaling, use_reentrant=False)
        return out

    def _chunks(self, q: Tensor, k: Tensor, v: Tensor, scores_BHT: Tensor, scaling: float) -> Tensor:
        out = []
        for start, end in pairwise(self.eviction.bounds):
            new, seen, gates_BHS = slice(start, end), slice(0, end), self.gates(scores_BHT, start)
            if gates_BHS is None:
                out.append(attend_rows(q[:, :, new], k[:, :, seen], v[:, :, seen], scaling))
            else:
                gates_BHE = F.pad(gates_BHS, (0, end - gates_BHS.shape[-1]), value=1.0)
                out.append(attend_gated(q[:, :, new], k[:, :, seen], v[:, :, seen], gates_BHE, scaling))
        return torch.cat(out, 2)

    def gates(self, scores_BHT: Tensor, start: int) -> Tensor | None:
        """Gates ``[B, H, S]`` of the history of the chunk at ``start``, its newest slots not counted; None where everything is
        kept."""
        e, S = self.eviction, start - self.eviction.newest
        if e.keep >= S:
            return None
        scores_BHS = scores_BHT[..., :S]
        soft_BHS = ((scores_BHS - threshold(scores_BHS, e.keep, e.temperature)) / e.temperature).sigmoid()
        if not self.hard:
            return soft_BHS
        kept_BHS = torch.zeros_like(soft_BHS).scatter(-1, scores_BHS.topk(e.keep, dim=-1).indices, 1.0)
        return kept_BHS + soft_BHS - soft_BHS.detach()


CEILING = 20.0
"""Most nats by which a slot behind a closed gate may stand above all that is seen: its weight stays finite."""


def attend_gated(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, gates_BHS: Tensor, scaling: float) -> Tensor:
    """Causal attention ``[B, Q, T, D]`` of the newest ``T`` rows, in which gates multiply what rows weigh before the sum is
    made 1. A gate of 0 hides its row; the gradient with respect to it says what opening it would change."""
    H, T, S = k_BHSD.shape[1], q_BQTD.shape[2], k_BHSD.shape[2]
    q_BHGTD = q_BQTD.unflatten(1, (H, -1))
    logits = (q_BHGTD * scaling) @ k_BHSD[:, :, None].transpose(-1, -2)  # [B, H, G, T, S]
    logits = logits.masked_fill(torch.ones(T, S, dtype=torch.bool, device=logits.device).triu(S - T + 1), float("-inf"))
    gates = gates_BHS[:, :, None, None].to(logits.dtype)
    top = logits.detach().masked_fill(gates.detach() <= 0, float("-inf")).amax(-1, keepdim=True)
    weights = (logits - top).clamp(max=CEILING).exp() * gates
    out = (weights @ v_BHSD[:, :, None]) / weights.sum(-1, keepdim=True)
    return out.flatten(1, 2)
