"""CIS target as a Triton kernel; ``reference.py`` defines it.

A program owns a block of slots and walks over all answer queries. With ``log_prob`` a first pass over the rows returns their
log-sum-exp. Neither pass holds a ``[T, S]`` matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import common
from ..checks import check_some
from ..column_stats.triton import norms
from ..common import check, check_heads, dot_rows, head_blocks, load_rows


@triton.jit
def _column_max(
    q, k, pos, lse, out, scale, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, H, T, S,
    G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    LOG_PROB: tl.constexpr,
):  # fmt: skip
    """Program axes: blocks of slots (BS of them), key/value heads of all batches; queries are read BT at a time."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    slots = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)  # [BS]
    there = slots < S
    keys = k + b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    k0, k1 = load_rows(keys, slots, there, stride_ks, D0, D1)  # [BS, D0], [BS, D1]
    zero = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    queries = q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * G * stride_qh
    best = tl.full([BLOCK_S], float("-inf"), tl.float32)  # over the queries so far
    for t in range(0, T, BLOCK_T):
        rows = t + tl.arange(0, BLOCK_T)  # [BT]
        alive = rows < T
        visible = slots[None, :] <= tl.load(pos + rows, mask=alive, other=-1)[:, None]  # [BT, BS]
        for g in range(G):
            q0, q1 = load_rows(queries + g * stride_qh, rows, alive, stride_qt, D0, D1)  # [BT, D0], [BT, D1]
            x = dot_rows(q0, q1, k0, k1, zero, D1) * scale  # [BT, BS]
            if LOG_PROB:
                x -= tl.load(lse + ((b * H + h) * G + g) * T + rows, mask=alive, other=0.0)[:, None]
            best = tl.maximum(best, tl.max(tl.where(visible, x, float("-inf")), 0))  # [BS]
    tl.store(out + tl.program_id(1).to(tl.int64) * S + slots, best, mask=there)


def column_max(q_BQTD: Tensor, k_BHSD: Tensor, q_pos_T: Tensor, scaling: float, *, log_prob: bool = False) -> Tensor:
    """See ``reference.column_max``."""
    B, H, G, T, S, D = check_heads(q_BQTD, k_BHSD)
    check(q_pos=q_pos_T)
    check_some("q", T, "answer queries")
    D0, D1 = head_blocks(D, q_BQTD.dtype)
    out = torch.empty(B, H, S, dtype=torch.float32, device=q_BQTD.device)
    lse = norms(q_BQTD, k_BHSD, scaling, q_pos_T) if log_prob else out  # `out` stands in for what is not read
    block_t, block_s = (64, 128) if D < 256 else (32, 64)
    common.launch(
        _column_max, (cdiv(S, block_s), B * H), q_BQTD, k_BHSD, q_pos_T, lse, out, scaling,
        *q_BQTD.stride()[:3], *k_BHSD.stride()[:3], H, T, S,
        G=G, D0=D0, D1=D1, BLOCK_T=block_t, BLOCK_S=block_s, LOG_PROB=log_prob, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
