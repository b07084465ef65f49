"""Block-sparse attention forward as a Triton kernel; ``__init__.py`` defines it.

A program owns some queries of one block and walks over the rows that the block attends to, by an index of their units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import common
from ..column_stats import check_queries
from ..common import LOG2E, check_heads, dot_rows, head_blocks, load_rows
from . import Blocks, check_units


@triton.jit
def _sparse_attend(
    q, k, v, out, index, count, scale, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb,
    stride_vh, stride_vs, H, T, S, N, U, QUERIES: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program axes: tiles of queries (BT of them, none across two blocks), query heads of all batches."""
    D: tl.constexpr = D0 + D1
    TILES: tl.constexpr = (QUERIES + BLOCK_T - 1) // BLOCK_T
    b, head = tl.program_id(1) // (H * G), tl.program_id(1) % (H * G)
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    inside = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # [BT]
    queries = block * QUERIES + inside
    alive = (inside < QUERIES) & (queries < T)
    q0, q1 = load_rows(  # [BT, D0], [BT, D1]
        q + b.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh, queries, alive, stride_qt, D0, D1
    )
    k += b.to(tl.int64) * stride_kb + (head // G).to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + (head // G).to(tl.int64) * stride_vh
    list_ = tl.program_id(1).to(tl.int64) * N + block
    index += list_ * U
    chosen = tl.load(count + list_) * UNIT
    zero = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    # Online softmax: `total` and `y` are sums over the rows so far, scaled by 2**-top; `top` is their largest logit.
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    y0 = tl.zeros([BLOCK_T, D0], tl.float32)
    y1 = tl.zeros([BLOCK_T, D1 if D1 > 0 else 16], tl.float32)
    # Rows up to its own, and not the number of that row: `rows <= own` is compiled wrongly by Triton 3.6, whose analysis then
    # takes one comparison for 16 queries.
    seen = queries + (S - T + 1)  # [BT]: rows up to each query's own
    for s in range(0, chosen, BLOCK_S):
        at = s + tl.arange(0, BLOCK_S)  # [BS]: place in the list of rows
        unit = tl.load(index + at // UNIT, mask=at < chosen, other=0)  # [BS]
        rows = unit * UNIT + at % UNIT
        there = (at < chosen) & (rows < S)
        k0, k1 = load_rows(k, rows, there, stride_ks, D0, D1)  # [BS, D0], [BS, D1]
        x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2E)  # [BT, BS]: logits to base 2
        x = tl.where((rows[None, :] < seen[:, None]) & there[None, :], x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))  # [BT]
        shift = tl.where(new == float("-inf"), 0.0, new)  # a query that has seen nothing yet: -inf - -inf is NaN
        weight = tl.exp2(x - shift[:, None])  # [BT, BS]
        fade = tl.exp2(top - shift)  # [BT]
        total = total * fade + tl.sum(weight, 1)
        v0, v1 = load_rows(v, rows, there, stride_vs, D0, D1)  # [BS, D0], [BS, D1]
        y0 = tl.dot(weight.to(v0.dtype), v0, y0 * fade[:, None], input_precision="ieee")  # [BT, D0]
        if D1 > 0:
            y1 = tl.dot(weight.to(v1.dtype), v1, y1 * fade[:, None], input_precision="ieee")  # [BT, D1]
        top = new
    share = (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]  # of a query that sees nothing, y is 0
    to = out + (tl.program_id(1).to(tl.int64) * T + queries)[:, None] * D  # [BT, 1] of [B * Q, T, D]
    tl.store(to + tl.arange(0, D0)[None, :], (y0 * share).to(out.dtype.element_ty), mask=alive[:, None])
    if D1 > 0:
        tl.store(to + D0 + tl.arange(0, D1)[None, :], (y1 * share).to(out.dtype.element_ty), mask=alive[:, None])


def sparse_attend(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, blocks: Blocks) -> Tensor:
    """See the definition, ``sparse_attend``."""
    B, H, G, T, S, D = check_heads(q_BQTD, k_BHSD, v_BHSD)
    check_queries(q_BQTD, k_BHSD)
    check_units(q_BQTD, k_BHSD, *blocks)
    D0, D1 = head_blocks(D, q_BQTD.dtype)
    seen_BQNU, queries, unit = blocks
    # The seen units of a block first, ascending, and how many there are.
    index_BQNU = seen_BQNU.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).int()
    count_BQN = seen_BQNU.sum(-1, dtype=torch.int32)
    block_t, block_s = min(64, max(16, triton.next_power_of_2(queries))), 64 if D < 128 else 32
    N, U = seen_BQNU.shape[2:]
    out = torch.empty(B, H * G, T, D, dtype=q_BQTD.dtype, device=q_BQTD.device)
    common.launch(
        _sparse_attend, (N * cdiv(queries, block_t), B * H * G), q_BQTD, k_BHSD, v_BHSD, out, index_BQNU, count_BQN,
        scaling, *q_BQTD.stride()[:3], *k_BHSD.stride()[:3], *v_BHSD.stride()[:3], H, T, S, N, U,
        QUERIES=queries, UNIT=unit, G=G, D0=D0, D1=D1, BLOCK_T=block_t, BLOCK_S=block_s,
        num_warps=4 if D < 128 else 8, num_stages=2,
    )  # fmt: skip
    return out
