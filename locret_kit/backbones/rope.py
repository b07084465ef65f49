"""Rotary position embedding, chosen once per prompt and applied by the kit itself.

The backbone's own rotation is switched off while a handler reads it (see ``intercept``), so queries and keys arrive
before RoPE and both position conventions, original and compact, are one multiplication here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locret_kernels.rotate import rotate_rows as rotate

__all__ = ["Rope", "rotate", "rotate_lean", "rotated_text"]


Tables = tuple[Tensor, Tensor]
"""cos and sin."""


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies ``[R / 2]`` (radians per position) and the factor on cos and sin (LongRoPE, YaRN)."""

    inv_freq: Tensor
    scaling: float = 1.0
    weight_R: Tensor | None = None
    """Weight of a norm that comes after the rotation (Hunyuan); its scale is part of what is rotated already."""
    queries: Rope | None = None
    """Rotation of queries, where it is not that of keys."""

    @property
    def of_queries(self) -> Rope:
        """Rotation of queries."""
        return self if self.queries is None else self.queries

    def tables(self, pos_T: Tensor, dtype: torch.dtype) -> Tables:
        """cos and sin ``[T, R]`` of integer positions, computed in float32 as transformers does."""
        angle = pos_T[:, None].float() * self.inv_freq.to(pos_T.device).float()
        angle = torch.cat((angle, angle), dim=-1)
        if (w_R := self.weight_R) is not None:
            # diag(w) R diag(w)^-1: what a channel takes of its partner is scaled by the ratio of their weights.
            sin = angle.sin() * (w_R / w_R.roll(len(w_R) // 2)).float().to(angle.device)
            return angle.cos().to(dtype), sin.to(dtype)
        return (angle.cos() * self.scaling).to(dtype), (angle.sin() * self.scaling).to(dtype)

    def both_tables(self, pos_T: Tensor, dtype: torch.dtype) -> tuple[Tables, Tables]:
        """``tables`` of keys and of queries."""
        tables = self.tables(pos_T, dtype)
        return tables, tables if self.queries is None else self.queries.tables(pos_T, dtype)


def rotated_text(rope: Rope, q_BQTD: Tensor, k_BHSD: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys after RoPE, from position 0 on. Queries may be those of the newest tokens alone."""
    T = q_BQTD.shape[2]
    keys, queries = rope.both_tables(torch.arange(k_BHSD.shape[2], device=q_BQTD.device), q_BQTD.dtype)
    return rotate(q_BQTD, *(table[-T:] for table in queries)), rotate(k_BHSD, *keys)


def rotate_lean(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """``rotate``, bit for bit, in fewer passes over memory and with fewer temporaries; no gradient goes through it."""
    r, half = cos_TR.shape[-1], cos_TR.shape[-1] // 2
    turned = x * cos_TR if r == x.shape[-1] else torch.cat((x[..., :r] * cos_TR, x[..., r:]), dim=-1)
    turned[..., :half] -= x[..., half:r] * sin_TR[..., :half]
    turned[..., half:r] += x[..., :half] * sin_TR[..., half:]
    return turned
