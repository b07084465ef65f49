"""Entry of new tokens as one Triton kernel; ``__init__.py`` defines it.

A program copies some tokens of one head. Of a few tokens it computes their scores in that head too; of a chunk another program
does that for all heads, in one product, so that activations are read and computed once.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import UPCAST, check
from ..quantise import HALF_MAX as MOST
from ..quantise import ROUNDING as HALF_ROUNDING
from ..quantise import SUBNORMAL as LEAST
from . import HeadProduct, RowBuffers, Score

HALF_MAX, ROUNDING, SUBNORMAL = tl.constexpr(MOST), tl.constexpr(HALF_ROUNDING), tl.constexpr(LEAST)
FEW = 16
"""Most tokens for each head's programs to compute their own scores."""
ZERO, GIVEN, ALONE, TOGETHER = (tl.constexpr(form) for form in range(4))
"""Scores: none, known, by the programs of each head, by one for all heads."""
HOST, FIRST, EACH = (tl.constexpr(form) for form in range(3))
"""A number of the host, one of the device, or each token's."""


@triton.jit
def _rows_of(at, t, h, there, stride_h, stride_t, apart, FORM: tl.constexpr):
    """Rows that tokens ``t`` take in heads ``h``."""
    if FORM == EACH:
        return tl.load(at + h * stride_h + t * stride_t, mask=there, other=0).to(tl.int64)
    first = at
    if FORM == FIRST:
        first = tl.load(at)
    return (first + t).to(tl.int64) + h.to(tl.int64) * apart


@triton.jit
def _activated(x):
    """SiLU, rounded to the type of ``x`` as PyTorch does."""
    wide = x.to(tl.float32)
    y = wide / (1.0 + tl.exp(-wide))
    return y if UPCAST else y.to(x.dtype)


@triton.jit
def _copy(x, there, base, step, zero, to, D: tl.constexpr, CODED: tl.constexpr, BLOCK_T: tl.constexpr,
          BLOCK_D: tl.constexpr):  # fmt: skip
    """Store rows from ``x [BT]`` on: as they are, or as codes of 8 bits with a step and a zero point for ``CODED`` channels."""
    columns = tl.arange(0, BLOCK_D)[None, :]  # [1, BD]
    keep = there[:, None] & (columns < D)  # [BT, BD]
    x = tl.load(x[:, None] + columns, mask=keep, other=0.0)
    if CODED:
        GROUPS: tl.constexpr = BLOCK_D // CODED
        x = tl.reshape(x.to(tl.float32), [BLOCK_T, GROUPS, CODED])
        # As `quantise.levels`: the zero point is rounded down; a step that is too small is made one unit larger.
        lo = tl.min(x, 2)  # [BT, GROUPS]
        near = _half(lo)
        low = tl.where(near.to(tl.float32) > lo, _half(lo - tl.abs(lo) * ROUNDING - SUBNORMAL), near)
        reach = tl.max(x, 2) - low.to(tl.float32)
        each = tl.div_rn(reach, 255.0)
        size = _half(tl.maximum(each, SUBNORMAL))
        size = tl.where(reach > 255.5 * size.to(tl.float32), _half(each * (1 + ROUNDING) + SUBNORMAL), size)
        y = tl.div_rn(x - low.to(tl.float32)[:, :, None], size.to(tl.float32)[:, :, None])
        # A sum with 1.5 * 2^23 rounds to even.
        y = (tl.minimum(tl.maximum(y, 0.0), 255.0) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        x = tl.reshape(y, [BLOCK_T, BLOCK_D])
        group = tl.arange(0, GROUPS)[None, :]  # [1, GROUPS]
        at, inside = to[:, None] * (D // CODED) + group, there[:, None] & (group < D // CODED)
        tl.store(step + at, size, mask=inside)
        tl.store(zero + at, low, mask=inside)
    tl.store(base + to[:, None] * D + columns, x.to(base.dtype.element_ty), mask=keep)


@triton.jit
def _half(x):
    """Float16, within its range."""
    return tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit(do_not_specialize=["at", "seen", "apart", "T"])
def _enter_rows(
    k, v, score, fc2, key_step, key_zero, value_step, value_zero, keys, values, positions, scores, stats, at, seen, stride_kh,
    stride_kt, stride_vh, stride_vt, stride_sh, stride_st, stride_ah, stride_at, stride_x, apart, H, T, R, X: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, CODED: tl.constexpr, SCORE: tl.constexpr, AT: tl.constexpr, SEEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program axes: blocks of tokens (BT), heads; one more than there are where it scores all."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BT]
    h, there = tl.program_id(1), t < T
    r = tl.arange(0, BLOCK_R)  # [BR]
    if SCORE == TOGETHER:  # noqa: SIM102  (a constant, then a number of the launch)
        if h == H:
            heads = tl.arange(0, BLOCK_H)  # [BH]
            total = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
            for first in range(0, R, BLOCK_R):
                some = (first + r < R)[None, :]
                x = tl.load(score + t[:, None] * stride_st + first + r[None, :], mask=there[:, None] & some, other=0.0)
                w = tl.load(fc2 + heads[:, None] * R + first + r[None, :], mask=(heads < H)[:, None] & some, other=0.0)
                w = w.to(tl.float32) if UPCAST else w.to(x.dtype)  # autocast gives another
                total = tl.dot(_activated(x), tl.trans(w), total, input_precision="ieee")  # [BT, BR] x [BR, BH]
            keep = there[:, None] & (heads < H)[None, :]  # [BT, BH]
            to = _rows_of(at, t[:, None], heads[None, :], keep, stride_ah, stride_at, apart, AT)
            tl.store(scores + to, total.to(fc2.dtype.element_ty).to(tl.float32), mask=keep)
    there = t < tl.where(h < H, T, 0)
    to = _rows_of(at, t, h, there, stride_ah, stride_at, apart, AT)  # [BT]
    _copy(k + h * stride_kh + t * stride_kt, there, keys, key_step, key_zero, to, D, CODED, BLOCK_T, BLOCK_D)
    _copy(v + h * stride_vh + t * stride_vt, there, values, value_step, value_zero, to, V, CODED, BLOCK_T, BLOCK_D)
    tl.store(positions + to, _rows_of(seen, t, 0 * h, there, 0, 1, 0, SEEN).to(tl.int32), mask=there)
    total = tl.zeros([BLOCK_T], tl.float32)
    if SCORE == ALONE:
        x = tl.load(score + t[:, None] * stride_st + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0)
        w = tl.load(fc2 + h * R + r, mask=r < R, other=0.0).to(tl.float32)
        total = tl.sum(_activated(x).to(tl.float32) * w[None, :], 1)  # [BT, BR] -> [BT]
        total = total.to(fc2.dtype.element_ty).to(tl.float32)
    if SCORE == GIVEN:
        total = tl.load(score + h * stride_sh + t * stride_st, mask=there, other=0.0).to(tl.float32)
    if SCORE != TOGETHER:
        tl.store(scores + to, total, mask=there)
    for n in range(X):
        tl.store(stats + n * stride_x + to, 0.0, mask=there)


def _form(x: int | Tensor, axes: int) -> int:
    """Form of ``at`` or ``seen``: a number of the host, a tensor of ``axes`` axes that is read element by element, or
    a tensor of another shape whose first element is read."""
    return (HOST if isinstance(x, int) else EACH if x.dim() == axes else FIRST).value


def enter_rows(
    rows: RowBuffers, at: int | Tensor, k_HTD: Tensor, v_HTD: Tensor, seen: int | Tensor, score: Score, *, apart: int = 0
) -> None:  # fmt: skip
    """See the definition, ``enter_rows``."""
    (H, T, D), V = k_HTD.shape, v_HTD.shape[-1]
    check_some("k", T, "tokens")
    check(k=k_HTD, v=v_HTD, keys=rows.keys_ND[:1], values=rows.values_ND[:1])
    given, fc2, strides, R, form = k_HTD, k_HTD, (0, 0), 1, ZERO.value
    if isinstance(score, HeadProduct):
        given, fc2 = score.hidden_BTR[0], score.fc2_HR.contiguous()
        check(hidden=given, fc2=fc2)
        strides, R, form = (0, given.stride(0)), fc2.shape[1], (ALONE if T <= FEW else TOGETHER).value
    elif score is not None:
        given, form = score[0], GIVEN.value
        strides = given.stride()
    coded = 0 if rows.levels is None else D // rows.levels.key_step_NC.shape[1]
    if coded and (coded & (coded - 1) or coded * rows.levels.value_step_NC.shape[1] != V):
        which = "a power of two, for keys and values (backend='triton')"
        raise ValueError(f"{coded} channels that share a step must be {which}")
    levels = rows.levels or (k_HTD,) * 4
    block_t, block_h, each = 1 if T <= FEW else 16, max(16, triton.next_power_of_2(H)), _form(at, 2) == EACH.value
    block_r = triton.next_power_of_2(R) if form == ALONE.value else max(64, min(256, 8192 // block_h))
    common.launch(
        _enter_rows, (cdiv(T, block_t), H + (form == TOGETHER.value)), k_HTD, v_HTD, given, fc2, *levels, *rows[:5], at, seen,
        *k_HTD.stride()[:2], *v_HTD.stride()[:2], *strides, *(at.stride() if each else (0, 0)),
        rows.stats_XN.stride(0), apart, H, T, R,
        X=len(rows.stats_XN), D=D, V=V, CODED=coded, SCORE=form, AT=_form(at, 2), SEEN=_form(seen, 1),
        BLOCK_T=block_t, BLOCK_D=triton.next_power_of_2(max(D, V)), BLOCK_H=block_h,
        BLOCK_R=block_r, num_warps=4, num_stages=2,
    )  # fmt: skip
