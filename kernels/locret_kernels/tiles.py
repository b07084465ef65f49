"""What the Triton kernels share: loading rows of a head, dot products over its size, and what they refuse.

A head of 96 is read as 64 + 32 columns, so that no lane works on padding: ``D0`` and ``D1`` are powers of two, ``D1`` may
be 0. Arithmetic in bfloat16 is wrong in Triton's interpreter, so there every load is turned to float32 (``UPCAST``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_SIZES = {64: (64, 0), 96: (64, 32), 128: (128, 0), 256: (256, 0)}
"""Head size -> its two blocks of columns."""
FLOAT32_HEAD = 64
"""The largest head that kernels take in float32, but for the interpreter."""
DTYPES = ("float32", "bfloat16", "float16")
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def load_rows(base, rows, keep, stride, D0: tl.constexpr, D1: tl.constexpr, UPCAST: tl.constexpr):
    """Two tiles ``[rows, D0]`` and ``[rows, D1]`` of a matrix with contiguous columns; zeros where ``keep`` is false. The
    second tile is a stand-in where ``D1`` is 0."""
    at = base + rows[:, None] * stride
    x0 = tl.load(at + tl.arange(0, D0)[None, :], mask=keep[:, None], other=0.0)
    if UPCAST:
        x0 = x0.to(tl.float32)
    x1 = x0
    if D1 > 0:
        x1 = tl.load(at + D0 + tl.arange(0, D1)[None, :], mask=keep[:, None], other=0.0)
        if UPCAST:
            x1 = x1.to(tl.float32)
    return x0, x1


@triton.jit
def dot_rows(a0, a1, b0, b1, out, D1: tl.constexpr):
    """``out`` plus the dot products ``[rows of a, rows of b]`` in float32."""
    out = tl.dot(a0, tl.trans(b0), out, input_precision="ieee")
    if D1 > 0:
        out = tl.dot(a1, tl.trans(b1), out, input_precision="ieee")
    return out


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
    """Every kernel starts here, on the device of its first argument, which need not be PyTorch's current one;
    ``benchmarks/compile_check.py`` puts a compiler in its place."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)


def head_blocks(D: int, dtype: torch.dtype) -> tuple[int, int]:
    """``(D0, D1)``. Raises ValueError for a head size without kernels, or one too large for the type: products of float32 have
    no tensor cores here, and their tiles do not fit the shared memory and the registers of every card."""
    if D not in HEAD_SIZES:
        raise ValueError(f"head size {D} must be one of: {', '.join(map(str, HEAD_SIZES))} (backend='triton')")
    if dtype == torch.float32 and D > FLOAT32_HEAD and not INTERPRETED:
        raise ValueError(
            f"float32 heads of {D} must be of at most {FLOAT32_HEAD} (backend='triton'): bfloat16, float16 may"
        )
    return HEAD_SIZES[D]


def check(**tensors: Tensor) -> None:
    """Refuse what the kernels cannot read; names the tensor. Meta tensors pass, so that launches can be compiled."""
    for name, x in tensors.items():
        if not (x.is_cuda or x.is_meta or INTERPRETED):
            raise ValueError(f"{name} is on {x.device}: backend='triton' takes CUDA tensors")
        if x.is_floating_point() and str(x.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name} is {x.dtype}: backend='triton' takes {', '.join(DTYPES)}")
        if x.dim() and x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension, which must be 1")
        if x.dim() > 1 and x.shape[-2] * x.stride(-2) >= 2**31:
            raise ValueError(f"{name} spans {x.shape[-2] * x.stride(-2)} elements a head, which must be below 2**31")


def check_heads(q_BQTD: Tensor, k_BHSD: Tensor) -> tuple[int, int, int, int, int, int]:
    """``B, H, G, T, S, D`` of queries and keys that fit each other."""
    check(q=q_BQTD, k=k_BHSD)
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    if Q % H or k_BHSD.shape[0] != B or k_BHSD.shape[3] != D:
        raise ValueError(f"q {tuple(q_BQTD.shape)} and k {tuple(k_BHSD.shape)} do not belong together")
    if q_BQTD.dtype != k_BHSD.dtype:
        raise ValueError(f"q is {q_BQTD.dtype} and k is {k_BHSD.dtype}: they must be of one type")
    return B, H, Q // H, T, S, D


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)
