"""Rotary position embedding of rows by tables of cos and sin: the definition, in torch and in the rows' own type, as transformers
rotates.
"""

import torch
from torch import Tensor

__all__ = ["rotate_rows"]


def rotate_rows(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate ``x [..., T, D]`` by the half-split convention; dimensions past ``R`` pass unchanged (partial rotary). Kernels take
    both halves of a table to be alike. Tables may have the other axes of ``x`` too."""
    r = cos_TR.shape[-1]
    part = x[..., :r]
    half = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), dim=-1)
    turned = part * cos_TR + half * sin_TR
    return turned if r == x.shape[-1] else torch.cat((turned, x[..., r:]), dim=-1)
