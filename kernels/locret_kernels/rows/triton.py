"""Entry, choice and move of rows as Triton kernels; ``__init__.py`` defines them.

Entry: a program copies some tokens of one head. Of a few tokens it computes their scores in that head too; of a chunk another
program does that for all heads, in one product, so that activations are read and computed once.

Choice: a score becomes an integer of the same order, and the smallest integer that stays is found from the top, two bits at a
time. Each digit is three counts over the head's rows, which lie in a card's nearest memory. The result is exact and the same in
every run: nothing is added in floating point, and there are no atomics.

In a compaction blocks of rows are read and written from the front. The index ascends, so a row is read before it is overwritten,
and rows that stay where they are cost nothing. Columns are independent, so a head's columns are spread over programs. Buffers of
one kind are one launch, wherever they lie: the kernel reads from a table where each begins.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_keep, check_some, common
from ..common import UPCAST, check
from ..quantise import HALF_MAX as MOST
from ..quantise import ROUNDING as HALF_ROUNDING
from ..quantise import SUBNORMAL as LEAST
from . import Addresses, HeadProduct, RowBuffers, Score, check_scores

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
    coded = D // rows.levels[0].shape[1] if rows.levels else 0
    if coded and (coded & (coded - 1) or coded * rows.levels[2].shape[1] != V):
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


@triton.jit
def _ordered(scores, marks, rows, S, oldest, largest, MARKED: tl.constexpr):
    """Keys ``[rows]`` (uint32) in the order of the reference's: 0 past the end, then padding (marks of 3), scores, protected rows
    (1, and those from ``oldest`` on), NaN, pinned rows (2)."""
    there = rows < S
    x = tl.load(scores + rows, mask=there, other=0.0).to(tl.float32)  # [BS]
    mark = tl.zeros_like(rows)
    if MARKED:
        mark = tl.load(marks + rows, mask=there, other=0).to(tl.int32)
    mark = tl.where((mark == 0) & (rows >= oldest), 1, mark)
    unknown = (x != x) & (mark == 0)
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    x = tl.where(mark == 1, float("inf"), tl.where(mark == 3, float("-inf"), x))
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -(2**31))  # negative numbers are in reverse, and below the others
    key = tl.where(x == 0.0, -(2**31), key)  # 0 and -0 are equal
    key = tl.where(unknown, -2, tl.where(mark == 2, -1, key))
    return tl.where(there, key, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _select_rows(
    scores, marks, most, out, largest, S, K, oldest, BLOCK_S: tl.constexpr, INDEX: tl.constexpr, MARKED: tl.constexpr
):
    """A program owns one head, and reads BS rows at a time. It writes whether each row stays, or with ``INDEX`` the ``K`` that
    do."""
    head = tl.program_id(0).to(tl.int64)
    scores += head * S
    marks += head * S
    out += head * (K if INDEX else S)
    wanted = K
    if not INDEX:
        wanted = tl.load(most + head).to(tl.int32)
    block, none = tl.arange(0, BLOCK_S), tl.zeros([BLOCK_S], tl.int32)  # [BS]
    # `least` grows to the largest key that `wanted` rows reach, from its highest digit on.
    least = tl.zeros([1], tl.uint32)
    digit = tl.full([1], 2**30, tl.uint32)
    for _ in range(16):
        one, two, three = least + digit, least + 2 * digit, least + 3 * digit  # [1]
        reach1, reach2, reach3 = none, none, none
        for s in range(0, S, BLOCK_S):
            key = _ordered(scores, marks, s + block, S, oldest, largest, MARKED)  # [BS]
            reach1 += (key >= one).to(tl.int32)
            reach2 += (key >= two).to(tl.int32)
            reach3 += (key >= three).to(tl.int32)
        least = tl.where(tl.sum(reach1, 0) >= wanted, one, least)
        least = tl.where(tl.sum(reach2, 0) >= wanted, two, least)
        least = tl.where(tl.sum(reach3, 0) >= wanted, three, least)
        digit = digit >> 2
    above, equal = none, none
    for s in range(0, S, BLOCK_S):
        key = _ordered(scores, marks, s + block, S, oldest, largest, MARKED)
        above += (key > least).to(tl.int32)
        equal += ((key == least) & (s + block < S)).to(tl.int32)
    # Of the rows with that key the newest stay: those with fewer after them than there is room for.
    room, left, placed = wanted - tl.sum(above, 0), tl.sum(equal, 0), 0
    for s in range(0, S, BLOCK_S):
        rows = s + block
        key = _ordered(scores, marks, rows, S, oldest, largest, MARKED)
        same = ((key == least) & (rows < S)).to(tl.int32)  # [BS]
        stays = ((key > least) | ((same != 0) & (left - tl.cumsum(same, 0) < room))).to(tl.int32)
        left -= tl.sum(same, 0)
        if INDEX:
            tl.store(out + placed + tl.cumsum(stays, 0) - 1, rows, mask=stays != 0)
            placed += tl.sum(stays, 0)
        else:
            tl.store(out + rows, stays.to(tl.uint8), mask=rows < S)


def _select(scores: Tensor, marks: Tensor | None, most: Tensor, out: Tensor, keep: int, newest: int) -> Tensor:
    """Write and return ``out``: the index ``[B, H, K]`` of ``keep`` rows. If ``keep`` is 0, it is marks ``[B, H, S]``
    of at most ``most`` rows."""
    scores, given = scores.contiguous(), scores if marks is None else marks.contiguous()
    check(scores=scores, marks=given, most=most)
    B, H, S = scores.shape
    common.launch(
        _select_rows, (B * H,), scores, given, most, out, torch.finfo(scores.dtype).max, S, keep, S - newest,
        BLOCK_S=min(2048, triton.next_power_of_2(S)), INDEX=keep > 0, MARKED=marks is not None, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


def select_rows(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, most_BH: Tensor) -> Tensor:
    """See the definition, ``select_rows``."""
    check_scores(scores_BHS, protected_BHS, valid_BHS, most_BH)
    marks = protected_BHS.to(torch.uint8).masked_fill(~valid_BHS, 3)
    stay = torch.empty_like(marks, memory_format=torch.contiguous_format)
    return _select(scores_BHS, marks, most_BH.contiguous(), stay, 0, 0).view(torch.bool)


def select_index(scores_BHS: Tensor, keep: int, newest: int = 0, guard_BHS: Tensor | None = None) -> Tensor:
    """See the definition, ``select_index``."""
    check_keep(keep, scores_BHS.shape[2])
    index = torch.empty(*scores_BHS.shape[:2], keep, dtype=torch.int32, device=scores_BHS.device)
    return _select(scores_BHS, guard_BHS, index, index, keep, newest)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size -> the type for copying its bits."""


@triton.jit
def _compact_rows(
    like, table, index, stride_h, stride_s, H, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """A program owns one head's block of columns. ``table [buffers, 2]``: address and layer of each; ``like`` is one of them."""
    buffer, h = tl.program_id(0) // H, tl.program_id(0) % H
    x = tl.load(table + 2 * buffer).to(like.dtype)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    x += h.to(tl.int64) * stride_h
    index += (tl.load(table + 2 * buffer + 1) * H + h) * K
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BD]
    # Before each block, rows below j are final and rows from j on are as they were: index[j] >= j. So a block's writes are in no
    # later block's way.
    for j in range(0, K, BLOCK_K):
        target = j + tl.arange(0, BLOCK_K)  # [BK]
        source = tl.load(index + target, mask=target < K, other=0).to(tl.int32)  # [BK]
        moves = ((target < K) & (source != target))[:, None] & (columns < D)[None, :]  # [BK, BD]
        rows = tl.load(x + source[:, None] * stride_s + columns[None, :], mask=moves, other=0)  # [BK, BD]
        tl.debug_barrier()  # every row of the block is read before one is written
        tl.store(x + target[:, None] * stride_s + columns[None, :], rows, mask=moves)


def compact_rows(buffers: Sequence[Sequence[Tensor]], index_LHK: Tensor, addresses: Addresses | None = None) -> None:
    """See the definition, ``compact_rows``."""
    index, addresses = index_LHK.contiguous(), {} if addresses is None else addresses
    _, H, K = index.shape
    kinds: dict[tuple[object, ...], list[tuple[Tensor, int]]] = {}
    for layer, own in enumerate(buffers):
        for buffer in own:
            check_keep(K, buffer.shape[1])
            rows = (buffer if buffer.dim() == 3 else buffer[..., None]).view(INTEGERS[buffer.element_size()])
            kinds.setdefault((rows.dtype, rows.shape[2], rows.stride()), []).append((rows, layer))
    for kind in kinds.values():
        numbers = tuple(number for rows, layer in kind for number in (rows.data_ptr(), layer))
        if numbers not in addresses:
            addresses[numbers] = torch.tensor(numbers, dtype=torch.int64, device=index.device)
        rows, D = kind[0][0], kind[0][0].shape[2]
        check(index=index, buffer=rows[0])
        block_d, most = min(16, triton.next_power_of_2(D)), 1024 if D > 1 else 2048
        common.launch(
            _compact_rows, (len(kind) * H, cdiv(D, block_d)), rows, addresses[numbers], index, *rows.stride()[:2], H, K, D,
            BLOCK_K=min(most, triton.next_power_of_2(K)), BLOCK_D=block_d,
            ALIGNED=not any(address % 16 for address in numbers[::2]), num_warps=16 if D > 1 else 8, num_stages=1,
        )  # fmt: skip
