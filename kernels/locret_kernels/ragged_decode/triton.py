"""Decoding attention over flat rows as a Triton kernel; ``reference.py`` defines it.

The rows of a head are split over programs, so that one token fills the card; each program returns its part of the output
with its log-sum-exp, and the parts are joined in a fixed order. The queries of a group share every row that is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..tiles import cdiv, check, dot_rows, head_blocks, load_rows


@triton.jit
def _rotated(x, base, rows, ranks, keep, stride, cos, sin, FIRST: tl.constexpr, N: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of rows of size ``D``, turned by their ranks."""
    columns = FIRST + tl.arange(0, N)
    low = columns < D // 2
    partner = tl.where(low, columns + D // 2, columns - D // 2)
    other = tl.load(base + rows[:, None] * stride + partner[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    at = ranks[:, None] * D + columns[None, :]
    c = tl.load(cos + at, mask=keep[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=keep[:, None], other=0.0).to(tl.float32)
    turned = x.to(tl.float32) * c + tl.where(low[None, :], -other, other) * s
    return turned.to(x.dtype)


@triton.jit
def _ragged_decode(
    q, keys, values, starts, lengths, cos, sin, out, norm, scale, stride_qb, stride_qh, stride_k, stride_v,
    H, per_split, G: tl.constexpr, BLOCK_G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_S: tl.constexpr,
    ROTATE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    LOG2: tl.constexpr = 1.4426950408889634  # log2(e)
    D: tl.constexpr = D0 + D1
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    start = tl.load(starts + head).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    members = tl.arange(0, BLOCK_G)
    alive = members < G
    q0, q1 = load_rows(
        q + b.to(tl.int64) * stride_qb + (h * G).to(tl.int64) * stride_qh, members, alive, stride_qh, D0, D1, UPCAST
    )
    keys += start * stride_k
    values += start * stride_v
    zero = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    y0 = tl.zeros([BLOCK_G, D0], tl.float32)
    y1 = tl.zeros([BLOCK_G, D1 if D1 > 0 else 16], tl.float32)
    begin = split * per_split
    for s in range(begin, tl.minimum(begin + per_split, length), BLOCK_S):
        rows = s + tl.arange(0, BLOCK_S)
        there = (rows < length) & (rows < begin + per_split)
        k0, k1 = load_rows(keys, rows, there, stride_k, D0, D1, UPCAST)
        if ROTATE:
            k0 = _rotated(k0, keys, rows, rows, there, stride_k, cos, sin, 0, D0, D)
            if D1 > 0:
                k1 = _rotated(k1, keys, rows, rows, there, stride_k, cos, sin, D0, D1, D)
        x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2)
        x = tl.where(there[None, :], x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        weight = tl.exp2(x - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(weight, 1)
        v0, v1 = load_rows(values, rows, there, stride_v, D0, D1, UPCAST)
        y0 = tl.dot(weight.to(v0.dtype), v0, y0 * fade[:, None], input_precision="ieee")
        if D1 > 0:
            y1 = tl.dot(weight.to(v1.dtype), v1, y1 * fade[:, None], input_precision="ieee")
        top = new
    empty = total == 0.0
    share = 1.0 / tl.where(empty, 1.0, total)
    at = (split.to(tl.int64) * tl.num_programs(0) + head) * G + members
    tl.store(norm + at, tl.where(empty, float("-inf"), top / LOG2 + tl.log(tl.where(empty, 1.0, total))), mask=alive)
    tl.store(out + at[:, None] * D + tl.arange(0, D0)[None, :], y0 * share[:, None], mask=alive[:, None])
    if D1 > 0:
        tl.store(out + at[:, None] * D + D0 + tl.arange(0, D1)[None, :], y1 * share[:, None], mask=alive[:, None])


def ragged_decode(
    q_BQD: Tensor,
    keys_ND: Tensor,
    values_ND: Tensor,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SD: Tensor | None = None,
    sin_SD: Tensor | None = None,
) -> Tensor:
    """See ``reference.ragged_decode``."""
    check(q=q_BQD, keys=keys_ND, values=values_ND)
    B, Q, D = q_BQD.shape
    H = starts_BH.shape[1]
    D0, D1 = head_blocks(D)
    if Q % H or keys_ND.shape[1] != D or values_ND.shape != keys_ND.shape:
        raise ValueError(
            f"q {tuple(q_BQD.shape)}, keys {tuple(keys_ND.shape)} and values {tuple(values_ND.shape)} do not belong together"
        )
    if not q_BQD.dtype == keys_ND.dtype == values_ND.dtype:
        raise ValueError("q, keys and values must be of one type")
    if (cos_SD is None) != (sin_SD is None):
        raise ValueError("cos and sin are given together or not at all")
    if cos_SD is not None and sin_SD is not None:
        check(cos=cos_SD, sin=sin_SD)
        if cos_SD.shape != sin_SD.shape or cos_SD.shape[1] != D or len(cos_SD) < longest:
            raise ValueError(f"cos {tuple(cos_SD.shape)} must be [at least {longest}, {D}], and sin alike")
        cos_SD, sin_SD = cos_SD.contiguous(), sin_SD.contiguous()
    block_s = (64 if D < 256 else 32) // (1 if cos_SD is None else 2)
    splits = max(1, min(cdiv(longest, 4 * block_s), cdiv(512, B * H)))
    per_split = cdiv(cdiv(longest, splits), block_s) * block_s
    splits = cdiv(longest, per_split)
    out = torch.empty(splits, B, Q, D, dtype=torch.float32, device=q_BQD.device)
    norm = torch.empty(splits, B, Q, 1, dtype=torch.float32, device=q_BQD.device)
    tiles.launch(
        _ragged_decode, (B * H, splits), q_BQD, keys_ND, values_ND, starts_BH.contiguous(), lengths_BH.contiguous(),
        q_BQD if cos_SD is None else cos_SD, q_BQD if sin_SD is None else sin_SD, out, norm, scaling,
        *q_BQD.stride()[:2], keys_ND.stride(0), values_ND.stride(0), H, per_split,
        G=Q // H, BLOCK_G=max(16, triton.next_power_of_2(Q // H)), D0=D0, D1=D1, BLOCK_S=block_s,
        ROTATE=cos_SD is not None, UPCAST=tiles.INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits == 1:
        return out[0].to(q_BQD.dtype)
    return ((norm - norm.logsumexp(0)).exp() * out).sum(0).to(q_BQD.dtype)
