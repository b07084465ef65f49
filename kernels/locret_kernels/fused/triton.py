"""Normalisation with the residual, the gated activation, and rotation, as Triton kernels; ``__init__.py`` defines them.

A row is read once and written once; torch's own operators pass over it ten times, five to rotate it. Values are rounded where the
reference rounds; a rotation is of float32 between. One half of each of its tables is read, since both are alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import check, check_width, head_blocks
from . import check_gate, check_norm


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, stride_x, stride_r, C, eps, BLOCK_C: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """A program owns one row, padded to BC columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)  # [BC]
    keep = columns < C
    y = tl.load(x + row * stride_x + columns, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + row * stride_r + columns, mask=keep, other=0.0).to(tl.float32)
        y = y.to(total.dtype.element_ty)
        tl.store(total + row * C + columns, y, mask=keep)
        y = y.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / C + eps)
    scale = tl.load(weight + columns, mask=keep, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + row * C + columns, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _swiglu(gate, up, out, stride_g, stride_u, C, BLOCK_C: tl.constexpr):
    """Program axes: rows, blocks of columns (BC of them)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    keep = columns < C
    g = tl.load(gate + row * stride_g + columns, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_u + columns, mask=keep, other=0.0).to(tl.float32)
    active = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * C + columns, (u * active).to(out.dtype.element_ty), mask=keep)


def _rows(x: Tensor) -> Tensor:
    """``x [..., C]`` as ``[N, C]``, a view where it can be one."""
    return x.reshape(-1, x.shape[-1])


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See the definition, ``rms_norm``; at most ``common.WIDEST`` columns."""
    check_norm(x, weight_C, residual)
    x_NC = _rows(x)
    (N, C), add = x_NC.shape, residual is not None
    other_NC = x_NC if residual is None else _rows(residual)
    check(x=x_NC, weight=weight_C, residual=other_NC)
    check_some("x", x.numel(), "numbers")
    check_width(C)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if add else x
    block = triton.next_power_of_2(C)
    common.launch(
        _rms_norm, (N,), x_NC, other_NC, weight_C, out, total, x_NC.stride(0), other_NC.stride(0), C, float(eps),
        BLOCK_C=block, ADD=add, num_warps=4 if block <= 1024 else 8, num_stages=1,
    )  # fmt: skip
    return out, total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``up * silu(gate)`` of two tensors ``[..., C]`` of one shape, in one launch; see the definition, ``swiglu``."""
    check_gate(gate, up)
    gate_NC, up_NC = _rows(gate), _rows(up)
    check(gate=gate_NC, up=up_NC)
    check_some("gate", gate.numel(), "numbers")
    N, C = gate_NC.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(C))
    common.launch(
        _swiglu, (N, cdiv(C, block)), gate_NC, up_NC, out, gate_NC.stride(0), up_NC.stride(0), C,
        BLOCK_C=block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


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
