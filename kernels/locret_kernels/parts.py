"""Attention that several programs made of different rows, joined by their log-sum-exps: one kernel for all that split rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .tiles import HEAD_SIZES, load_rows


@triton.jit
def _join(parts, norms, out, norm, N, splits, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr):
    LOG2: tl.constexpr = 1.4426950408889634  # log2(e)
    D: tl.constexpr = D0 + D1
    n = tl.program_id(0).to(tl.int64)
    parts += n * D
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    y0 = tl.zeros([D0], tl.float32)
    y1 = tl.zeros([D1 if D1 > 0 else 16], tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        there = split < splits
        x = tl.load(norms + n + split.to(tl.int64) * N, mask=there, other=float("-inf")) * LOG2
        new = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(x - shift)
        fade = tl.exp2(top - shift)
        x0, x1 = load_rows(parts, split.to(tl.int64), there, N * D, D0, D1, False)
        total = total * fade + tl.sum(weight, 0)
        y0 = y0 * fade + tl.sum(weight[:, None] * x0, 0)
        if D1 > 0:
            y1 = y1 * fade + tl.sum(weight[:, None] * x1, 0)
        top = new
    tl.store(norm + n + tl.arange(0, 1), (top + tl.log2(total)) / LOG2)
    to = out + n * D
    tl.store(to + tl.arange(0, D0), (y0 / total).to(out.dtype.element_ty))
    if D1 > 0:
        tl.store(to + D0 + tl.arange(0, D1), (y1 / total).to(out.dtype.element_ty))


def joined(parts_PND: Tensor, norm_PN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output ``[..., D]`` and natural log-sum-exp ``[...]`` of ``P`` parts ``[P, ..., D]`` and theirs ``[P, ...]`` (float32), of
    which at least one has rows, in a fixed order."""
    splits, N, D = len(parts_PND), norm_PN[0].numel(), parts_PND.shape[-1]
    if splits == 1:
        return parts_PND[0].to(dtype), norm_PN[0]
    D0, D1 = HEAD_SIZES[D]
    out = torch.empty(parts_PND.shape[1:], dtype=dtype, device=parts_PND.device)
    norm = torch.empty(norm_PN.shape[1:], dtype=torch.float32, device=parts_PND.device)
    tiles.launch(
        _join, (N,), parts_PND, norm_PN, out, norm, N, splits, D0=D0, D1=D1, BLOCK=32 if D < 128 else 16, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return out, norm
