"""Attention over two parts of the rows, joined by one Triton kernel, and the attention of the newest queries; ``__init__.py``
defines them. Attention itself is PyTorch's on a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import common
from ..column_stats import causal, check_queries
from ..column_stats.triton import logits
from ..common import check, check_heads


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
    at_a = a + n * stride_ab + head * stride_ah + t[:, None] * stride_at + columns  # [BT, BD]
    u = tl.load(at_a, mask=keep, other=0.0).to(tl.float32)
    at_b = b + n * stride_bb + head * stride_bh + t[:, None] * stride_bt + columns
    v = tl.load(at_b, mask=keep, other=0.0).to(tl.float32)
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


def window_attention(q_BQWD: Tensor, k_BHSD: Tensor, scaling: float) -> Tensor:
    """See the definition, ``window_attention``."""
    check_queries(q_BQWD, k_BHSD)
    B, H, G, W, S, _ = check_heads(q_BQWD, k_BHSD)
    out = torch.zeros(B, H, S, dtype=torch.float32, device=q_BQWD.device)
    for part, x in logits(q_BQWD, k_BHSD, scaling):
        n = S - W + part.start + x.shape[3]
        out[..., :n] += causal(x[..., :n], float("-inf")).softmax(-1).sum((2, 3)) / G
    return out
