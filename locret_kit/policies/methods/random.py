"""Random eviction, a baseline, and the hash that all draws are made from."""

from typing import ClassVar

import torch
from torch import Tensor

from ..base import Entry, Score
from ..registry import part, register


@part("score", "random")
class Random(Score):
    """Uniform in [0, 1), a function of seed, layer, head and position alone. Source: RoCo, section 5.1.4."""

    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        """Scores ``[B, H, T]``: a hash of position, seed, layer and head."""
        head_H = torch.arange(entry.k.shape[1], device=entry.k.device)[:, None]
        return hashed(entry.positions, entry.seed, entry.layer, head_H).expand(entry.k.shape[:3])


def hashed(x: Tensor, *salts: int | Tensor) -> Tensor:
    """Uniform numbers in [0, 1) (float32) of the integers' broadcast shape. They depend on the integers only, on
    every platform."""
    x = _mix(x)
    for salt in salts:
        x = _mix(x + salt)
    return (x & 0xFFFFFF).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (xor-shift and odd multiplications) of each element; any shape."""
    x = x & 0x7FFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return x ^ (x >> 16)


register("random", "RoCo, section 5.1.4", {"score": Random()}, keeps="chance")
