"""Rotary position embedding as one Triton kernel; ``__init__.py`` defines it.

Rows are read once and written once, with float32 arithmetic between. One half of each table is read, since both are alike.
torch's own operators pass over the rows five times, and each chunk rotates every row of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import check, head_blocks


@triton.jit
def _rotate_rows(
    x, cos, sin, out, stride_xb, stride_xh, stride_xs, stride_ob, stride_oh, stride_os, stride_tb, stride_th, H, S,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program axes: blocks of rows (BS of them), heads of all batches."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)  # [BS]
    columns = tl.arange(0, BLOCK_H)  # [BH]: of the first half; each has its partner HALF columns on
    there = (rows < S)[:, None]  # [BS, 1]
    keep = there & (columns < HALF)[None, :]  # [BS, BH]
    read = x + b * stride_xb + h * stride_xh + rows[:, None] * stride_xs + columns[None, :]  # [BS, BH]
    write = out + b * stride_ob + h * stride_oh + rows[:, None] * stride_os + columns[None, :]  # [BS, BH]
    angle = b * stride_tb + h * stride_th + rows[:, None] * (2 * HALF) + columns[None, :]  # [BS, BH]
    low = tl.load(read, mask=keep, other=0.0).to(tl.float32)
    high = tl.load(read + HALF, mask=keep, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=keep, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=keep, other=0.0).to(tl.float32)
    tl.store(write, (low * c - high * s).to(out.dtype.element_ty), mask=keep)
    tl.store(write + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=keep)
    for first in range(2 * HALF, D, BLOCK_H):  # partial rotary: these pass unchanged
        keep = there & (first + columns < D)[None, :]
        tl.store(write + first, tl.load(read + first, mask=keep, other=0.0), mask=keep)


def rotate_rows(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """See the definition, ``rotate_rows``; ``x`` is ``[B, H, T, D]``."""
    check(x=x, cos=cos_TR, sin=sin_TR)
    (B, H, S, D), R = x.shape, cos_TR.shape[-1]
    head_blocks(D, x.dtype)
    check_some("x", x.numel(), "numbers")
    if cos_TR.shape != sin_TR.shape or R % 2 or not 2 <= R <= D:
        raise ValueError(f"cos {tuple(cos_TR.shape)} must have an even number of columns up to {D}, and sin its shape")
    # Axes that the tables lack are expanded, so their stride is 0.
    cos, sin = (table.contiguous().expand(B, H, S, R) for table in (cos_TR, sin_TR))
    # The axes of the output lie in the order of the input's: a projection's [B, T, heads, D] stays one.
    out, block_s = torch.empty_like(x), 32 if D < 256 else 16
    check(out=out)
    common.launch(
        _rotate_rows, (cdiv(S, block_s), B * H), x, cos, sin, out, *x.stride()[:3], *out.stride()[:3],
        *cos.stride()[:2], H, S,
        D=D, HALF=R // 2, BLOCK_H=triton.next_power_of_2(R // 2), BLOCK_S=block_s, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return out
