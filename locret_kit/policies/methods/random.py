"""Random eviction, a baseline, and the hash that all draws are made from."""

import torch
from torch import Tensor

from ..base import Entry, Score
from ..registry import part, register


@part("score", "random")
class Random(Score):
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


register("random", "RoCo, section 5.1.4", {"score": Random()}, keeps="chance")
