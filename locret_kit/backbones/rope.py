"""Rotary position embedding, chosen once per prompt and applied by the kit itself.

The backbone's own rotation is switched off while a handler reads it (see ``intercept``), so queries and keys arrive
before RoPE and both position conventions, original and compact, are one multiplication here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locret_kernels.rotate import rotate_rows as rotate

__all__ = ["Rope", "rotate", "rotate_lean"]


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies ``[R / 2]`` (radians per position) and the factor on cos and sin (LongRoPE, YaRN)."""

    inv_freq: Tensor
    scaling: float = 1.0

    def tables(self, pos_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, R]`` of integer positions, computed in float32 as transformers does."""
        angle = pos_T[:, None].float() * self.inv_freq.to(pos_T.device).float()
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * self.scaling).to(dtype), (angle.sin() * self.scaling).to(dtype)


def rotate_lean(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """``rotate``, bit for bit, in fewer passes over memory and with fewer temporaries; no gradient goes through it."""
    r, half = cos_TR.shape[-1], cos_TR.shape[-1] // 2
    turned = x * cos_TR if r == x.shape[-1] else torch.cat((x[..., :r] * cos_TR, x[..., r:]), dim=-1)
    turned[..., :half] -= x[..., half:r] * sin_TR[..., :half]
    turned[..., half:r] += x[..., :half] * sin_TR[..., half:]
    return turned
