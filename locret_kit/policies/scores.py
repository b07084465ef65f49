"""How much a slot is worth. Each score is a frozen dataclass whose fields are its parameters.

``a`` is the attention of one query to one slot, the mean over the query heads that share the slot's key (RoCo, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.backend import function

from .base import Entry, ScorePart, Slots, at_least, resolve_count


def recent_attention(slots: Slots, newest: int) -> Tensor:
    """``sum of a`` ``[B, H, S]`` over the ``newest`` queries, each over the slots up to its own; zero at padding."""
    q_BQWD, k_BHSD = slots.queries(), slots.keys()
    window_attention = function("window_attention", slots.backend)
    B, H, S = slots.positions.shape
    if slots.lengths is None:
        W = min(newest, q_BQWD.shape[2], S)
        return window_attention(q_BQWD[:, :, -W:], k_BHSD, slots.scaling)
    out_BHS = torch.zeros(B, H, S, device=k_BHSD.device)
    G = q_BQWD.shape[1] // H
    for (b, h), n in zip(product(range(B), range(H)), slots.lengths, strict=True):
        W = min(newest, q_BQWD.shape[2], n)
        if W:
            q_1GWD = q_BQWD[b : b + 1, h * G : (h + 1) * G, -W:]
            k_11ND = k_BHSD[b : b + 1, h : h + 1, S - n :]
            out_BHS[b, h, S - n :] = window_attention(q_1GWD, k_11ND, slots.scaling)[0, 0]
    return out_BHS


class Weight(ScorePart):
    """A score that is a weight itself: attention received, or information in nats. It is at least 0."""

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return scores_BHS.clamp(min=torch.finfo(scores_BHS.dtype).tiny).log()


@dataclass(frozen=True)
class Cis(ScorePart):
    """Predicted causal importance of the layer's retaining head. Source: Locret, section 3.2."""

    needs_heads: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        if entry.head is None:
            raise ValueError("score=cis needs retaining heads")
        return entry.head(entry.q, entry.k, entry.v)

    def comparable(self, scores_BHS: Tensor, slots: Slots) -> Tensor:
        """A raw logit means nothing across heads before a softmax over the head's slots; a log-probability is one already,
        and only the order matters to an allocation, so it stays as it is."""
        if slots.target != "logit":
            return scores_BHS
        return scores_BHS.masked_fill(~slots.valid, float("-inf")).softmax(-1)

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        """A logit and a log-probability are logarithms of attention, but for a constant of the head."""
        return scores_BHS


@dataclass(frozen=True)
class Recency(ScorePart):
    """The token's position: the newest is worth most."""

    def score_new_tokens(self, entry: Entry) -> Tensor:
        B, H, T, _ = entry.k.shape
        pos_T = entry.position + torch.arange(T, device=entry.k.device)
        return pos_T.float().expand(B, H, T)


@dataclass(frozen=True)
class Random(ScorePart):
    """Uniform in [0, 1), a function of seed, layer, head and position alone. Source: RoCo, section 5.1.4."""

    def score_new_tokens(self, entry: Entry) -> Tensor:
        B, H, T, _ = entry.k.shape
        pos_T = entry.position + torch.arange(T, device=entry.k.device)
        head_H = torch.arange(H, device=entry.k.device)[:, None]
        return hashed(pos_T, entry.seed, entry.layer, head_H).expand(B, H, T)


def hashed(x: Tensor, *salts: int | Tensor) -> Tensor:
    """Uniform in [0, 1) (float32), a function of integers that broadcast; the same on every platform."""
    x = _mix(x)
    for salt in salts:
        x = _mix(x + salt)
    return (x & 0xFFFFFF).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (xor-shift and odd multiplications)."""
    x = x & 0x7FFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Aas(Weight):
    """Accumulated attention: ``sum of a`` over every query since the slot entered. Source: H2O, arXiv 2306.14048."""

    statistics: ClassVar[frozenset[str]] = frozenset({"sum"})

    def score_slots(self, slots: Slots) -> Tensor:
        return slots.stats["sum"]


@dataclass(frozen=True)
class Aqas(Weight):
    """How many queries gave the slot more than ``1 / n``, ``n`` slots being visible to the query. Source: ScissorHands,
    arXiv 2305.17118."""

    statistics: ClassVar[frozenset[str]] = frozenset({"above"})

    def score_slots(self, slots: Slots) -> Tensor:
        return slots.stats["above"]


@dataclass(frozen=True)
class Mas(Weight):
    """Mean attention: ``sum of a / count``, ``count`` queries having seen the slot. Source: RoCo, section 4."""

    statistics: ClassVar[frozenset[str]] = frozenset({"sum", "count"})

    def score_slots(self, slots: Slots) -> Tensor:
        return slots.stats["sum"] / slots.stats["count"]


@dataclass(frozen=True)
class Ltas(Weight):
    """Attention of the last token, in each head for itself (RoCo, section 4.1); the code of its authors takes the mean over all
    heads of a layer, which then keep the same slots. Source: TOVA, arXiv 2401.06104."""

    def recent(self, chunk: int) -> int:
        return 1

    def score_slots(self, slots: Slots) -> Tensor:
        return recent_attention(slots, 1)


@dataclass(frozen=True)
class WindowAttention(Weight):
    """``sum of a`` over the newest ``window`` queries, then the maximum over ``kernel`` neighbouring slots (as Ada-KV, section
    4.1, gives SnapKV's settings; the code of its authors can also take the mean). The newest ``window`` slots are neither
    pooled nor pooled from, whatever the scope protects. Source: SnapKV, arXiv 2404.14469.

    The newest queries of the text count, not of the last block alone: a block shorter than the window leaves the rest of it
    to the blocks before. A query looks from the place of its rank among the newest slots; where one of those tokens was
    evicted (no scope protects it), that is an older slot's place. A head that holds fewer slots than the window (a budget
    below it, or a small share of an adaptive one) sums over as many of the newest queries as it has slots, and pools nothing.
    """

    window: int = 32
    """Queries."""
    kernel: int = 7
    """Slots; 1 does not pool."""

    def __post_init__(self) -> None:
        check_window("window", self.window, self.kernel)

    def recent(self, chunk: int) -> int:
        return self.window

    def score_slots(self, slots: Slots) -> Tensor:
        scores_BHS = recent_attention(slots, self.window)
        before = max(0, scores_BHS.shape[-1] - self.window)
        if before and self.kernel > 1:
            pooled = F.max_pool1d(scores_BHS[..., :before], self.kernel, stride=1, padding=self.kernel // 2)
            scores_BHS[..., :before] = pooled
        return scores_BHS


@dataclass(frozen=True)
class ProxyAttention(Weight):
    """``sum of a`` over the proxy queries: the newest ``tokens``. A question that ends the prompt is named by its length.
    Source: NaCl, section 5.1."""

    tokens: int | float = 0.1
    """A number of tokens, or a fraction of the chunk (of the prompt, in the one-shot form)."""

    def __post_init__(self) -> None:
        check_size("proxy", "tokens", self.tokens, 1)

    def recent(self, chunk: int) -> int:
        return proxy_count(self.tokens, chunk)

    def score_slots(self, slots: Slots) -> Tensor:
        return recent_attention(slots, self.recent(slots.chunk))


def proxy_count(tokens: int | float, chunk: int) -> int:
    """How many of the newest tokens are proxies: at least one, at most the chunk."""
    return max(1, resolve_count(tokens, chunk))


def check_size(part: str, name: str, size: int | float, low: int) -> None:
    """Raise ValueError unless ``size`` is an integer of at least ``low`` or a fraction from 0 to 1."""
    if isinstance(size, float) and not 0 <= size <= 1:
        raise ValueError(f"{part}({name}={size}): a fraction must be from 0 to 1; a number of tokens has no point")
    if isinstance(size, int):
        at_least(part, low, **{name: size})


def check_window(part: str, window: int, kernel: int) -> None:
    """Raise ValueError unless there are queries to sum over and the pooled neighbourhood has a middle."""
    at_least(part, 1, window=window)
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"{part}(kernel={kernel}): kernel must be odd and at least 1")


@dataclass(frozen=True)
class Entropy(Weight):
    """``-log P(token | tokens before it)`` under the backbone as it reads with this cache: one number a token, the same in
    every layer and head; 0 for the first token of a text. Source: SirLLM, arXiv 2405.12528."""

    needs_logits: ClassVar[bool] = True
