"""Rotary position embedding, chosen once per prompt and applied by the kit itself.

The backbone's own rotation is switched off while a handler reads it (see ``intercept``), so queries and keys arrive before RoPE
and both position conventions, original and compact, are one multiplication here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from locret_kernels.fused import rotate_rows
from locret_kernels.ragged_decode import angle_steps

rotate = rotate_rows
"""Rotation of rows by tables of cos and sin."""
Tables = tuple[Tensor, Tensor]
"""cos and sin."""


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies ``[R / 2]`` (radians per position) and the factor on cos and sin (LongRoPE, YaRN)."""

    inv_freq: Tensor
    scaling: float = 1.0
    weight_R: Tensor | None = None
    """Weight of a norm after the rotation (Hunyuan). The rotated queries or keys already include its scale."""
    queries: Rope | None = None
    """Rotation of queries, where it is not that of keys."""
    made: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    """``steps``, by how far they reach: graphs read them, so none is made anew."""

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

    def steps(self, longest: int, device: torch.device) -> Tensor:
        """``angle_steps`` [steps, 2, R / 2] (float32) of the ranks below a power of two that is at least ``longest``."""
        key = 1 << (longest - 1).bit_length(), device
        if key not in self.made:
            with torch.inference_mode(False):
                self.made[key] = angle_steps(self.inv_freq.to(device), key[0], self.scaling)
        return self.made[key]

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


def same_rotation(some: Sequence[Rope], others: Sequence[Rope]) -> bool:
    """Whether layers rotate by the same frequencies and factors."""
    pairs = zip(some, others, strict=True)
    return all(a is b or (a.scaling == b.scaling and torch.equal(a.inv_freq, b.inv_freq)) for a, b in pairs)
