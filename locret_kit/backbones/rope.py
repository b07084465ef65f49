"""Rotary position embedding, chosen once per prompt and applied by the kit itself.

The backbone's own rotation is switched off while a handler reads it (see ``intercept``), so queries and keys arrive
before RoPE and both position conventions, original and compact, are one multiplication here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies ``[R / 2]`` (radians a position) and the factor on cos and sin (LongRoPE, YaRN)."""

    inv_freq: Tensor
    scaling: float = 1.0

    def tables(self, pos_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, R]`` of integer positions, computed in float32 as transformers does."""
        angle = pos_T[:, None].float() * self.inv_freq.to(pos_T.device).float()
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * self.scaling).to(dtype), (angle.sin() * self.scaling).to(dtype)


def rotate(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate ``x [..., T, D]`` by the half-split convention; dimensions past ``R`` pass unchanged (partial rotary)."""
    r = cos_TR.shape[-1]
    part = x[..., :r]
    half = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), dim=-1)
    turned = part * cos_TR + half * sin_TR
    return turned if r == x.shape[-1] else torch.cat((turned, x[..., r:]), dim=-1)
