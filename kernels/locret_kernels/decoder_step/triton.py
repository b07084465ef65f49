"""Matrix products of one decoded token, fused with the norm, gate or residual next to them; ``__init__.py`` defines them.

A program holds a few rows of a matrix and walks over all rows with the stride of the grid. Weights depend on no other launch:
with programmatic dependent launch (PDL) a program loads its first tile before it waits for the previous launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import common
from ..backend import capability
from ..common import UPCAST, check, check_width
from . import RowProducts, check_stage

TILE = 8192
"""Numbers of a tile of weights: each thread has 8 loads of 16 bytes in flight."""
COLUMNS = 2048
"""Columns of a tile without a norm."""


@triton.jit
def _among(n, first, second, third, fourth, A, B, C, K, PARTS: tl.constexpr, ALIGNED: tl.constexpr):
    """Addresses of rows ``n`` of stacked matrices with ``K`` columns, which begin at rows 0, ``A``, ``B`` and ``C``. ``ALIGNED``
    tells the compiler that all are multiples of 16: it loses that at a choice."""
    n = n.to(tl.int64)
    at = first + n * K
    if PARTS > 1:
        at = tl.where(n < A, at, second + (n - A) * K)
    if PARTS > 2:
        at = tl.where(n < B, at, third + (n - B) * K)
    if PARTS > 3:
        at = tl.where(n < C, at, fourth + (n - C) * K)
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def _rounded(x, kind: tl.constexpr):
    """``x`` (float32) rounded as PyTorch's intermediate results; unchanged in the interpreter, which would truncate."""
    return x if UPCAST else x.to(kind).to(tl.float32)


@triton.jit
def _row_products(
    x, norm, w0, w1, w2, w3, b0, b1, b2, b3, residual, out, A, B, C, N, K, eps, PARTS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program axis: blocks of rows (BN), with the stride of the grid."""
    kind = out.dtype.element_ty
    k = tl.arange(0, BLOCK_K)[None, :]  # [1, BK]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    tile = tl.load(
        _among(n, w0, w1, w2, w3, A, B, C, K, PARTS, ALIGNED)[:, None] + k, mask=(n < N)[:, None] & (k < K), other=0.0
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)  # [1, BK]
    if NORM:
        v *= tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / K + eps)
        v = _rounded(v, kind) * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        v = _rounded(v, kind)
    for _ in range(tl.program_id(0) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        there = (n < N)[:, None]
        at = _among(n, w0, w1, w2, w3, A, B, C, K, PARTS, ALIGNED)[:, None] + k  # [BN, BK]
        total = tile.to(tl.float32) * v
        other = total
        if GATED:
            up = w1 + n.to(tl.int64)[:, None] * K + k
            other = tl.load(up, mask=there & (k < K), other=0.0).to(tl.float32) * v
        if not NORM:  # with a norm one tile holds all columns
            for first in range(BLOCK_K, K, BLOCK_K):
                u = tl.load(x + first + k, mask=first + k < K, other=0.0).to(tl.float32)
                total += tl.load(at + first, mask=there & (first + k < K), other=0.0).to(tl.float32) * u
        row, n = n, n + tl.num_programs(0) * BLOCK_N
        ahead = _among(n, w0, w1, w2, w3, A, B, C, K, PARTS, ALIGNED)[:, None] + k
        tile = tl.load(ahead, mask=(n < N)[:, None] & (k < K), other=0.0)
        y = tl.sum(total, 1)  # [BN, BK] -> [BN]
        z = tl.sum(other, 1) if GATED else y
        if BIAS:
            y += tl.load(_among(row, b0, b1, b2, b3, A, B, C, 1, PARTS, False), mask=row < N, other=0.0).to(tl.float32)
            if GATED:
                z += tl.load(b1 + row, mask=row < N, other=0.0).to(tl.float32)
        if GATED:
            y = _rounded(y, kind)
            y = _rounded(y / (1.0 + tl.exp(-y)), kind) * _rounded(z, kind)
        if ADD:
            y = _rounded(y, kind) + tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
        tl.store(out + row, y.to(kind), mask=row < N)


def has_pdl(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch."""
    return capability(device) >= (9, 0)


def row_products(x_NK: Tensor, stage: RowProducts, residual: Tensor | None = None) -> list[Tensor]:
    """See the definition, ``row_products``; for one vector."""
    check_stage(x_NK, stage, residual)
    if len(x_NK) != 1:
        raise ValueError(f"x has {len(x_NK)} vectors, which must be 1 (backend='triton')")
    (weights, biases, norm, eps, gated), K = stage, x_NK.shape[1]
    check(x=x_NK, residual=x_NK if residual is None else residual, **{f"w{i}": w for i, w in enumerate(weights)})
    if not all(map(Tensor.is_contiguous, weights)):  # a copy would be read before it is made
        raise ValueError(f"weights of strides {[*map(Tensor.stride, weights)]} must be contiguous (backend='triton')")
    if norm is not None:
        check_width(K)
    sizes = [len(weight) for weight in weights]
    made, parts = ([sizes[0]], 1) if gated else (sizes, len(sizes))
    # The first matrix stands in for those that the kernel does not read.
    given, ends = [*weights, *weights[:1] * 3][:4], [sum(sizes[:i]) for i in (1, 2, 3)]
    added = [x for x in biases if x is not None]
    out = torch.empty(1, sum(made), dtype=x_NK.dtype, device=x_NK.device)
    block_k = triton.next_power_of_2(K if norm is not None else min(K, COLUMNS))
    block_n = max(1, min(16, TILE // block_k))
    # All run at once: two thirds of them where programs have eight warps, by the registers of compile_table.csv.
    warps, thirds = (4, 3) if block_k <= 4096 else (8, 2)
    blocks, programs = cdiv(sum(made), block_n), common.programs(x_NK.device) * thirds // 3
    aligned = all(n * x_NK.itemsize % 16 == 0 for n in (K, *map(Tensor.storage_offset, weights)))
    common.launch(
        _row_products, (cdiv(blocks, cdiv(blocks, programs)),), x_NK, x_NK if norm is None else norm, *given,
        *[*added, *given][:4], x_NK if residual is None else residual, out, *ends, sum(made), K, float(eps),
        PARTS=parts, NORM=norm is not None, GATED=gated, BIAS=bool(added), ADD=residual is not None,
        PDL=has_pdl(x_NK.device), ALIGNED=aligned, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return list(out.split(made, 1))
