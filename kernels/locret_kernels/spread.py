"""The rotation in which values of few bits are stored: what stands out in one channel is spread over many."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix ``[size, size]`` (float32), orthonormal and its own inverse; where ``size`` is no power of
    two, blocks of the largest one that divides it stand on the diagonal."""
    side = size & -size
    with torch.inference_mode(False):
        block, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        while len(block) < side:
            block = torch.kron(block, pair)
        return torch.kron(torch.eye(size // side), block / side**0.5).to(device)
