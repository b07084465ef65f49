"""A retaining head as one Triton kernel; ``reference.py`` defines it.

A program owns a block of tokens and a block of hidden units: it walks over the heads of q, k and v with the columns of fc1
that belong to them, applies the activation in registers and multiplies by its columns of fc2 at once. Neither the
concatenation nor the hidden layer reaches memory; the parts of the blocks of hidden units are added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..bounds import check_some
from ..tiles import cdiv, check, dot_rows, head_blocks, load_rows
from .reference import ACTIVATIONS


@triton.jit
def _heads_times_weights(
    acc, x, stride_h, stride_t, w, stride_w, heads, tokens, alive, units, real,
    D0: tl.constexpr, D1: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``acc [tokens, units]`` plus the heads of one of q, k, v times their columns of fc1, which begin at ``w``."""
    for _ in range(heads):
        x0, x1 = load_rows(x, tokens, alive, stride_t, D0, D1, UPCAST)
        w0, w1 = load_rows(w, units, real, stride_w, D0, D1, UPCAST)
        acc = dot_rows(x0, x1, w0, w1, acc, D1)
        x += stride_h
        w += D0 + D1
    return acc


@triton.jit
def _score_head(
    q, k, v, fc1, fc2, out,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_w, stride_2,
    B, Q, H, T, R, D0: tl.constexpr, D1: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr, SILU: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    units = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    alive, real = tokens < T, units < R
    wide = b.to(tl.int64)
    x = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    x = _heads_times_weights(
        x, q + wide * stride_qb, stride_qh, stride_qt, fc1, stride_w, Q, tokens, alive, units, real, D0, D1, UPCAST
    )
    x = _heads_times_weights(
        x, k + wide * stride_kb, stride_kh, stride_kt, fc1 + Q * (D0 + D1), stride_w, H, tokens, alive, units, real,
        D0, D1, UPCAST,
    )  # fmt: skip
    x = _heads_times_weights(
        x, v + wide * stride_vb, stride_vh, stride_vt, fc1 + (Q + H) * (D0 + D1), stride_w, H, tokens, alive, units, real,
        D0, D1, UPCAST,
    )  # fmt: skip
    if SILU:
        x = x * tl.sigmoid(x)
    else:  # GELU, tanh form: (1 + tanh(u)) / 2 is sigmoid(2 u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    heads = tl.arange(0, BLOCK_H)
    w2 = tl.load(fc2 + heads[:, None] * stride_2 + units[None, :], mask=(heads < H)[:, None] & real[None, :], other=0.0)
    if UPCAST:
        w2 = w2.to(tl.float32)
    score = tl.dot(x.to(w2.dtype), tl.trans(w2), input_precision="ieee")
    at = ((tl.program_id(2) * B + b) * H + heads[None, :]).to(tl.int64) * T + tokens[:, None]
    tl.store(out + at, score, mask=alive[:, None] & (heads < H)[None, :])


def score_head(
    q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, fc1_RE: Tensor, fc2_HR: Tensor, *, activation: str = "silu"
) -> Tensor:
    """See ``reference.score_head``."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of: {', '.join(ACTIVATIONS)}")
    check(q=q_BQTD, k=k_BHTD, v=v_BHTD, fc1=fc1_RE, fc2=fc2_HR)
    B, Q, T, D = q_BQTD.shape
    check_some("q", T, "tokens")
    H, R = fc2_HR.shape
    if k_BHTD.shape != (B, H, T, D) or v_BHTD.shape != k_BHTD.shape or fc1_RE.shape != (R, (Q + 2 * H) * D):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BQTD, k_BHTD, v_BHTD, fc1_RE, fc2_HR))
        raise ValueError(f"q, k, v, fc1 and fc2 do not belong together: {shapes}")
    if len({x.dtype for x in (q_BQTD, k_BHTD, v_BHTD, fc1_RE, fc2_HR)}) > 1:
        raise ValueError("q, k, v, fc1 and fc2 must be of one type")
    D0, D1 = head_blocks(D, q_BQTD.dtype)
    block_t, block_r = 64, 64
    parts = torch.empty(cdiv(R, block_r), B, H, T, dtype=torch.float32, device=q_BQTD.device)
    tiles.launch(
        _score_head, (cdiv(T, block_t), B, cdiv(R, block_r)), q_BQTD, k_BHTD, v_BHTD, fc1_RE, fc2_HR, parts,
        *q_BQTD.stride()[:3], *k_BHTD.stride()[:3], *v_BHTD.stride()[:3], fc1_RE.stride(0), fc2_HR.stride(0), B, Q, H, T, R,
        D0=D0, D1=D1, BLOCK_T=block_t, BLOCK_R=block_r, BLOCK_H=max(16, triton.next_power_of_2(H)),
        SILU=activation == "silu", UPCAST=tiles.INTERPRETED, num_warps=4 if D < 256 else 8, num_stages=2,
    )  # fmt: skip
    return parts.sum(0)
