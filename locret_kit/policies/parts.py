"""The parts there are. Each is a frozen dataclass whose fields are its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Context, Entry


@dataclass(frozen=True)
class Cis:
    """Predicted causal importance of the layer's retaining head. Source: Locret, section 3.2."""

    needs_heads: ClassVar[bool] = True

    def enter(self, entry: Entry) -> Tensor:
        if entry.head is None:
            raise ValueError("score=cis needs retaining heads")
        return entry.head(entry.q, entry.k, entry.v)


@dataclass(frozen=True)
class Recency:
    """The token's position: the newest is worth most."""

    needs_heads: ClassVar[bool] = False

    def enter(self, entry: Entry) -> Tensor:
        B, H, T, _ = entry.k.shape
        pos_T = torch.arange(entry.position, entry.position + T, device=entry.k.device, dtype=torch.float32)
        return pos_T.expand(B, H, T)


@dataclass(frozen=True)
class Random:
    """Uniform in [0, 1), a function of seed, layer, head and position alone. Source: RoCo, section 5.1.4."""

    needs_heads: ClassVar[bool] = False

    def enter(self, entry: Entry) -> Tensor:
        B, H, T, _ = entry.k.shape
        pos_T = torch.arange(entry.position, entry.position + T, dtype=torch.int64)
        head_H = torch.arange(H, dtype=torch.int64)[:, None]
        x = _mix(_mix(_mix(_mix(pos_T) + entry.seed) + entry.layer) + head_H)
        return ((x & 0xFFFFFF).float() / 2**24).to(entry.k.device).expand(B, H, T)


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (xor-shift and odd multiplications), the same on every platform."""
    x = x & 0x7FFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Sinks:
    """The first ``n`` tokens of the text. Source: StreamingLLM."""

    n: int = 4

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError(f"sinks(n={self.n}): n must be at least 0")

    def protects(self, context: Context) -> Tensor:
        return context.positions < self.n


@dataclass(frozen=True)
class Stabilizers:
    """The newest slots, as many as the run says (``--stabilizers``), except at the last eviction of the prompt.
    Source: Locret, section 3.4."""

    def protects(self, context: Context) -> Tensor:
        S = context.positions.shape[-1]
        return (torch.arange(S, device=context.positions.device) >= S - context.stabilizers).expand_as(
            context.positions
        )


@dataclass(frozen=True)
class TopK:
    """Protected slots first, then by score; ties go to the newer slot, so runs repeat exactly."""

    def select(self, scores_BHS: Tensor, protected_BHS: Tensor, keep: int) -> Tensor:
        scores_BHS = scores_BHS.masked_fill(protected_BHS, float("inf"))
        newest_first = scores_BHS.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :keep]
        return (scores_BHS.shape[-1] - 1 - newest_first).sort(dim=-1).values
