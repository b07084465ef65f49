"""Normalisation with the residual, and the gated activation, as Triton kernels; ``__init__.py`` defines them.

A row is read once and written once; torch's own operators pass over it ten times. Values are rounded where the reference
rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import check, check_width
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
