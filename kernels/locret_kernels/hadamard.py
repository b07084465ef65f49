"""Hadamard rotation, under which values of few bits are stored: it spreads what stands out in one channel over many."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix ``[size, size]`` (float32), orthonormal and its own inverse. Where ``size`` is no power of
    two, blocks of the largest power that divides it stand on the diagonal."""
    side = size & -size
    with torch.inference_mode(False):  # the cached matrix may be used where gradients are needed
        block = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=block.dtype, device="cpu")
        while len(block) < side:
            block = torch.kron(block, pair)
        return torch.kron(torch.eye(size // side, dtype=block.dtype, device="cpu"), block / side**0.5).to(device)
