"""Attention forward with its log-sum-exp as a Triton kernel; ``__init__.py`` defines it.

A program owns a block of queries of one head and walks over the rows they see, keeping maximum, sum and output. It begins with
the blocks of rows that all of them see, without a mask. Few queries are spread over the card by splitting
the rows, whose parts are merged in a fixed order.

Triton lays the warps of two products in a row along the queries only where the first tile is at least as long as the second is
wide. Otherwise each query's softmax is spread over the warps, with barriers in the loop: hence 128 queries for heads of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import common
from ..column_stats import check_queries
from ..common import LOG2E, check, check_heads, dot_rows, head_blocks, load_rows, merge_splits, split_rows


@triton.jit
def _read_block(
    q0, q1, k, v, rows, seen, end, top, total, y0, y1, scale, stride_ks, stride_vs, zero, D0: tl.constexpr,
    D1: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and output of the queries after one more block of ``rows``. Without ``MASKED`` all see all of them."""
    there = rows < end
    k0, k1 = load_rows(k, rows, there, stride_ks, D0, D1, MASKED)  # [BS, D0], [BS, D1]
    x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2E)  # [BT, BS]: logits to base 2
    if MASKED:
        x = tl.where((rows[None, :] < seen[:, None]) & there[None, :], x, float("-inf"))
    new = tl.maximum(top, tl.max(x, 1))  # [BT]
    shift = new
    if MASKED:
        shift = tl.where(new == float("-inf"), 0.0, new)  # a query that has seen nothing yet: -inf - -inf is NaN
    weight = tl.exp2(x - shift[:, None])  # [BT, BS]
    fade = tl.exp2(top - shift)  # [BT]
    v0, v1 = load_rows(v, rows, there, stride_vs, D0, D1, MASKED)  # [BS, D0], [BS, D1]
    y0 = tl.dot(weight.to(v0.dtype), v0, y0 * fade[:, None], input_precision="ieee")  # [BT, D0]
    if D1 > 0:
        y1 = tl.dot(weight.to(v1.dtype), v1, y1 * fade[:, None], input_precision="ieee")  # [BT, D1]
    return new, total * fade + tl.sum(weight, 1), y0, y1


@triton.jit
def _attend(
    q, k, v, out, norm, scale, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh,
    stride_vs, H, T, S, per_split, G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program axes: blocks of queries (BT of them), query heads of all batches, splits of the rows (read BS at a time)."""
    D: tl.constexpr = D0 + D1
    b, head = tl.program_id(1) // (H * G), tl.program_id(1) % (H * G)
    queries = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BT]
    alive = queries < T
    q0, q1 = load_rows(  # [BT, D0], [BT, D1]
        q + b.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh, queries, alive, stride_qt, D0, D1
    )
    k += b.to(tl.int64) * stride_kb + (head // G).to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + (head // G).to(tl.int64) * stride_vh
    zero = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    # Online softmax: `total` and `y` are sums over the rows so far, scaled by 2**-top; `top` is their largest logit.
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    y0 = tl.zeros([BLOCK_T, D0], tl.float32)
    y1 = tl.zeros([BLOCK_T, D1 if D1 > 0 else 16], tl.float32)
    seen = queries + (S - T + 1)  # [BT]: rows that each query sees
    begin = tl.program_id(2) * per_split
    end = tl.minimum(tl.minimum(begin + per_split, S), tl.program_id(0) * BLOCK_T + BLOCK_T + S - T)
    # Rows that every query of the block sees, in whole blocks.
    whole = tl.maximum(tl.minimum(end, tl.program_id(0) * BLOCK_T + 1 + S - T) - begin, 0) // BLOCK_S * BLOCK_S
    for s in range(begin, begin + whole, BLOCK_S):
        top, total, y0, y1 = _read_block(
            q0, q1, k, v, s + tl.arange(0, BLOCK_S), seen, end, top, total, y0, y1, scale, stride_ks, stride_vs, zero,
            D0, D1, False,
        )  # fmt: skip
    for s in range(begin + whole, end, BLOCK_S):
        top, total, y0, y1 = _read_block(
            q0, q1, k, v, s + tl.arange(0, BLOCK_S), seen, end, top, total, y0, y1, scale, stride_ks, stride_vs, zero,
            D0, D1, True,
        )  # fmt: skip
    empty = total == 0.0  # a split whose rows all come after the query
    total = tl.where(empty, 1.0, total)
    at = (
        tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    ) * T + queries  # [BT] of [splits, B * Q, T]
    tl.store(norm + at, tl.where(empty, float("-inf"), (top + tl.log2(total)) / LOG2E), mask=alive)
    to = out + at[:, None] * D  # [BT, 1]
    share = (1.0 / total)[:, None]
    tl.store(to + tl.arange(0, D0)[None, :], (y0 * share).to(out.dtype.element_ty), mask=alive[:, None])
    if D1 > 0:
        tl.store(to + D0 + tl.arange(0, D1)[None, :], (y1 * share).to(out.dtype.element_ty), mask=alive[:, None])


@triton.jit
def _join_parts(
    a, b, lse_a, lse_b, out, lse, stride_ab, stride_ah, stride_at, stride_bb, stride_bh, stride_bt, stride_ob, stride_oh,
    stride_ot, Q, T, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program axes: blocks of queries (BT of them), query heads of all batches."""
    n, head = (tl.program_id(1) // Q).to(tl.int64), (tl.program_id(1) % Q).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BT]
    columns = tl.arange(0, BLOCK_D)[None, :]  # [1, BD]
    at = tl.program_id(1).to(tl.int64) * T + t
    x = tl.load(lse_a + at, mask=t < T, other=0.0)
    y = tl.load(lse_b + at, mask=t < T, other=0.0)
    top = tl.maximum(x, y)
    total = tl.exp(x - top) + tl.exp(y - top)  # [BT]
    tl.store(lse + at, top + tl.log(total), mask=t < T)
    share, keep = (tl.exp(y - top) / total)[:, None], (t < T)[:, None] & (columns < D)  # [BT, 1], [BT, BD]
    u = tl.load(a + n * stride_ab + head * stride_ah + t[:, None] * stride_at + columns, mask=keep, other=0.0).to(
        tl.float32
    )
    v = tl.load(b + n * stride_bb + head * stride_bh + t[:, None] * stride_bt + columns, mask=keep, other=0.0).to(
        tl.float32
    )
    to = out + n * stride_ob + head * stride_oh + t[:, None] * stride_ot + columns
    tl.store(to, (u + share * (v - u)).to(out.dtype.element_ty), mask=keep)


def join_parts(a_BQTD: Tensor, lse_a_BQT: Tensor, b_BQTD: Tensor, lse_b_BQT: Tensor) -> tuple[Tensor, Tensor]:
    """See the definition, ``join_parts``."""
    check(a=a_BQTD, b=b_BQTD, lse_a=lse_a_BQT, lse_b=lse_b_BQT)
    (B, Q, T, D), out, lse = a_BQTD.shape, torch.empty_like(a_BQTD), torch.empty_like(lse_a_BQT)
    common.launch(
        _join_parts, (cdiv(T, 32), B * Q), a_BQTD, b_BQTD, lse_a_BQT.contiguous(), lse_b_BQT.contiguous(), out, lse,
        *(n for x in (a_BQTD, b_BQTD, out) for n in x.stride()[:3]), Q, T,
        D=D, BLOCK_T=32, BLOCK_D=triton.next_power_of_2(D), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, lse


def attend(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """See the definition, ``attend``."""
    B, H, G, T, S, D = check_heads(q_BQTD, k_BHSD, v_BHSD)
    check_queries(q_BQTD, k_BHSD)
    D0, D1 = head_blocks(D, q_BQTD.dtype)
    # 16 rows are the least that a tensor core multiplies; see above for 128.
    block_t = 16 if T <= 16 else 128 if D in (96, 128) and T > 64 else 64
    block_s = 64 if D < 256 else 32
    splits, per_split = split_rows(S, block_s, cdiv(T, block_t) * B * H * G)
    part = q_BQTD.dtype if splits == 1 else torch.float32
    out = torch.empty(splits, B, H * G, T, D, dtype=part, device=q_BQTD.device)
    norm = torch.empty(splits, B, H * G, T, dtype=torch.float32, device=q_BQTD.device)
    common.launch(
        _attend, (cdiv(T, block_t), B * H * G, splits), q_BQTD, k_BHSD, v_BHSD, out, norm, scaling,
        *q_BQTD.stride()[:3], *k_BHSD.stride()[:3], *v_BHSD.stride()[:3], H, T, S, per_split,
        G=G, D0=D0, D1=D1, BLOCK_T=block_t, BLOCK_S=block_s, num_warps=8 if D == 256 or block_t == 128 else 4, num_stages=2,
    )  # fmt: skip
    return merge_splits(out, norm, q_BQTD.dtype)
