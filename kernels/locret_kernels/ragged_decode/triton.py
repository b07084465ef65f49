"""Decoding attention over flat rows, in full or in few bits, as Triton kernels; ``reference.py`` defines them.

The rows of a head are split over programs, so that one token fills the card; each program returns its part of the output
with its log-sum-exp, and the parts are joined in a fixed order. The queries of a group share every row that is read.
Codes are turned into numbers in registers: of a row in few bits only its bytes are read, and the levels of its group. Its values
stay rotated there: those of the tail are rotated before, and the output is rotated back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..bounds import check_some
from ..parts import joined
from ..spread import hadamard
from ..tiles import cdiv, check, dot_rows, head_blocks, load_rows
from .reference import Decoded, PackedRows

LOG2 = 1.4426950408889634  # log2(e)


@triton.jit
def _partner(columns, R: tl.constexpr):
    """The column that rotation of the first ``R`` pairs each column with; its own behind them."""
    HALF: tl.constexpr = R // 2
    return tl.where(columns < HALF, columns + HALF, tl.where(columns < R, columns - HALF, columns))


@triton.jit
def _rotated(x, base, rows, places, keep, stride, cos, sin, FIRST: tl.constexpr, N: tl.constexpr,
             R: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of rows whose first ``R`` are turned by their places."""
    columns = FIRST + tl.arange(0, N)
    partner = _partner(columns, R)
    other = tl.load(base + rows[:, None] * stride + partner[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    other = tl.where((columns < R // 2)[None, :], -other, other)
    return _turn(x.to(tl.float32), other, cos, sin, places, keep, FIRST, N, R).to(x.dtype)


@triton.jit
def _turn(x, other, cos, sin, places, keep, FIRST: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """Columns ``x`` and their signed partners ``other`` turned by the angles of their places (float32)."""
    columns = FIRST + tl.arange(0, N)
    inside = keep[:, None] & (columns < R)[None, :]
    at = places[:, None] * R + columns[None, :]
    c = tl.load(cos + at, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    return x * c + other * s


@triton.jit
def _places(place, rows, keep, PLACED: tl.constexpr):
    """Where rows are rotated to: their rank, or what is given where it is more."""
    if PLACED:
        rows = tl.maximum(rows, tl.load(place + rows, mask=keep, other=0).to(tl.int32))
    return rows


@triton.jit
def _ragged_decode(
    q, keys, values, starts, lengths, cos, sin, place, logits, out, norm, scale, stride_qb, stride_qh, stride_k, stride_v,
    H, S, per_split, G: tl.constexpr, BLOCK_G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_S: tl.constexpr,
    ROTATE: tl.constexpr, PLACED: tl.constexpr, RECEIVED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    LOG2: tl.constexpr = 1.4426950408889634  # log2(e)
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
    place += start
    logits += (head.to(tl.int64) * G + members)[:, None] * S
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
        if ROTATE > 0:
            places = _places(place, rows, there, PLACED)
            k0 = _rotated(k0, keys, rows, places, there, stride_k, cos, sin, 0, D0, ROTATE)
            if D1 > 0:
                k1 = _rotated(k1, keys, rows, places, there, stride_k, cos, sin, D0, D1, ROTATE)
        x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2)
        if RECEIVED:
            tl.store(logits + rows[None, :], x, mask=alive[:, None] & there[None, :])
        x = tl.where(there[None, :], x, float("-inf"))
        v0, v1 = load_rows(values, rows, there, stride_v, D0, D1, UPCAST)
        top, total, y0, y1 = _absorb(x, v0, v1, top, total, y0, y1, D1)
    at = (split.to(tl.int64) * tl.num_programs(0) + head) * G + members
    _store_part(out, norm, at, alive, top, total, y0, y1, D0, D1)


@triton.jit
def _absorb(x, v0, v1, top, total, y0, y1, D1: tl.constexpr):
    """Running maximum, sum and output of a softmax after one more block: logits ``x`` (times log2(e)) and values."""
    new = tl.maximum(top, tl.max(x, 1))
    weight = tl.exp2(x - new[:, None])
    fade = tl.exp2(top - new)
    y0 = tl.dot(weight.to(v0.dtype), v0, y0 * fade[:, None], input_precision="ieee")
    if D1 > 0:
        y1 = tl.dot(weight.to(v1.dtype), v1, y1 * fade[:, None], input_precision="ieee")
    return new, total * fade + tl.sum(weight, 1), y0, y1


@triton.jit
def _store_part(out, norm, at, alive, top, total, y0, y1, D0: tl.constexpr, D1: tl.constexpr):
    """A part of the output with its log-sum-exp; a part without rows weighs nothing."""
    D: tl.constexpr = D0 + D1
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    share = 1.0 / total
    tl.store(norm + at, tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453), mask=alive)
    tl.store(out + at[:, None] * D + tl.arange(0, D0)[None, :], y0 * share[:, None], mask=alive[:, None])
    if D1 > 0:
        tl.store(out + at[:, None] * D + D0 + tl.arange(0, D1)[None, :], y1 * share[:, None], mask=alive[:, None])


@triton.jit
def _numbers(codes, rows, columns, keep, step, zero, BITS: tl.constexpr, D: tl.constexpr):
    """``[rows, columns]`` (float32) of rows of codes; ``step`` and ``zero`` are pointers of that shape."""
    PER_BYTE: tl.constexpr = 8 // BITS
    mask = keep[:, None]
    at = codes + rows[:, None] * (D // PER_BYTE) + (columns // PER_BYTE)[None, :]
    shift = (columns % PER_BYTE) * BITS
    code = (tl.load(at, mask=mask, other=0).to(tl.int32) >> shift[None, :]) & (2**BITS - 1)
    low = tl.load(zero, mask=mask, other=0.0).to(tl.float32)
    return low + code.to(tl.float32) * tl.load(step, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _keys(codes, group, step, zero, tail, rows, first_of_tail, packed, newest, FIRST: tl.constexpr, N: tl.constexpr,
          TURN: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of keys, from their codes or from the tail (float32); where ``TURN`` is above 0 those that
    rotation of the first ``TURN`` columns pairs them with, their sign included."""
    columns = FIRST + tl.arange(0, N)
    low = columns < TURN // 2
    if TURN > 0:
        columns = _partner(columns, TURN)
    level = group[:, None] * D + columns[None, :]
    x = _numbers(codes, rows, columns, packed, step + level, zero + level, BITS, D)
    held = tl.load(tail + (rows - first_of_tail)[:, None] * D + columns[None, :], mask=newest[:, None], other=0.0)
    x = tl.where(packed[:, None], x, held.to(tl.float32))
    if TURN > 0:
        x = tl.where(low[None, :], -x, x)
    return x


@triton.jit
def _values(codes, step, zero, tail, rows, first_of_tail, packed, newest, FIRST: tl.constexpr, N: tl.constexpr,
            GROUPS: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of values, from their codes or from the tail (float32)."""
    columns = FIRST + tl.arange(0, N)
    level = rows[:, None] * GROUPS + (columns // (D // GROUPS))[None, :]
    x = _numbers(codes, rows, columns, packed, step + level, zero + level, BITS, D)
    held = tl.load(tail + (rows - first_of_tail)[:, None] * D + columns[None, :], mask=newest[:, None], other=0.0)
    return tl.where(packed[:, None], x, held.to(tl.float32))


@triton.jit
def _packed_decode(
    q, key_codes, value_codes, groups, key_step, key_zero, value_step, value_zero, tail_keys, tail_values, tails,
    starts, lengths, cos, sin, place, logits, out, norm, scale, stride_qb, stride_qh, H, sharing, M, R, S, per_split,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_S: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, ROTATE: tl.constexpr, PLACED: tl.constexpr, RECEIVED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    LOG2: tl.constexpr = 1.4426950408889634  # log2(e)
    D: tl.constexpr = D0 + D1
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    start = tl.load(starts + head).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    first_of_tail = length - tl.load(tails + head).to(tl.int32)
    members = tl.arange(0, BLOCK_G)
    alive = members < G
    q0, q1 = load_rows(
        q + b.to(tl.int64) * stride_qb + (h * G).to(tl.int64) * stride_qh, members, alive, stride_qh, D0, D1, UPCAST
    )
    key_codes += start * (D * BITS // 8)
    value_codes += start * (D * BITS // 8)
    value_step += start * GROUPS
    value_zero += start * GROUPS
    groups += start
    place += start
    logits += (head.to(tl.int64) * G + members)[:, None] * S
    key_step += (head // sharing).to(tl.int64) * M * D
    key_zero += (head // sharing).to(tl.int64) * M * D
    tail_keys += head.to(tl.int64) * R * D
    tail_values += head.to(tl.int64) * R * D
    zero = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    y0 = tl.zeros([BLOCK_G, D0], tl.float32)
    y1 = tl.zeros([BLOCK_G, D1 if D1 > 0 else 16], tl.float32)
    begin = split * per_split
    for s in range(begin, tl.minimum(begin + per_split, length), BLOCK_S):
        rows = s + tl.arange(0, BLOCK_S)
        there = (rows < length) & (rows < begin + per_split)
        packed, newest = there & (rows < first_of_tail), there & (rows >= first_of_tail)
        group = tl.load(groups + rows, mask=packed, other=0).to(tl.int32)
        k0 = _keys(key_codes, group, key_step, key_zero, tail_keys, rows, first_of_tail, packed, newest,
                   0, D0, 0, BITS, D)  # fmt: skip
        places = _places(place, rows, there, PLACED)
        if ROTATE > 0:
            turned = _keys(key_codes, group, key_step, key_zero, tail_keys, rows, first_of_tail, packed, newest,
                           0, D0, ROTATE, BITS, D)  # fmt: skip
            k0 = _turn(k0, turned, cos, sin, places, there, 0, D0, ROTATE)
        k0 = k0.to(q0.dtype)
        k1 = k0
        if D1 > 0:
            k1 = _keys(key_codes, group, key_step, key_zero, tail_keys, rows, first_of_tail, packed, newest,
                       D0, D1, 0, BITS, D)  # fmt: skip
            if ROTATE > 0:
                turned = _keys(key_codes, group, key_step, key_zero, tail_keys, rows, first_of_tail, packed, newest,
                               D0, D1, ROTATE, BITS, D)  # fmt: skip
                k1 = _turn(k1, turned, cos, sin, places, there, D0, D1, ROTATE)
            k1 = k1.to(q0.dtype)
        x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2)
        if RECEIVED:
            tl.store(logits + rows[None, :], x, mask=alive[:, None] & there[None, :])
        x = tl.where(there[None, :], x, float("-inf"))
        v0 = _values(value_codes, value_step, value_zero, tail_values, rows, first_of_tail, packed, newest,
                     0, D0, GROUPS, BITS, D).to(q0.dtype)  # fmt: skip
        v1 = v0
        if D1 > 0:
            v1 = _values(value_codes, value_step, value_zero, tail_values, rows, first_of_tail, packed, newest,
                         D0, D1, GROUPS, BITS, D).to(q0.dtype)  # fmt: skip
        top, total, y0, y1 = _absorb(x, v0, v1, top, total, y0, y1, D1)
    at = (split.to(tl.int64) * tl.num_programs(0) + head) * G + members
    _store_part(out, norm, at, alive, top, total, y0, y1, D0, D1)


def ragged_decode(
    q_BQD: Tensor,
    keys_ND: Tensor,
    values_ND: Tensor,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SR: Tensor | None = None,
    sin_SR: Tensor | None = None,
    place_N: Tensor | None = None,
    received: bool = False,
) -> Decoded:
    """See ``reference.ragged_decode``."""
    check(q=q_BQD, keys=keys_ND, values=values_ND)
    B, Q, D = q_BQD.shape
    H = starts_BH.shape[1]
    D0, D1 = head_blocks(D, q_BQD.dtype)
    if Q % H or keys_ND.shape[1] != D or values_ND.shape != keys_ND.shape:
        raise ValueError(
            f"q {tuple(q_BQD.shape)}, keys {tuple(keys_ND.shape)} and values {tuple(values_ND.shape)} do not belong together"
        )
    if not q_BQD.dtype == keys_ND.dtype == values_ND.dtype:
        raise ValueError("q, keys and values must be of one type")
    cos, sin, place = _tables(cos_SR, sin_SR, place_N, longest, q_BQD)
    block_s = (64 if D < 256 else 32) // (1 if cos_SR is None else 2)
    splits, per_split = _splits(longest, block_s, B * H)
    parts = _parts(q_BQD, splits, longest, received)
    tiles.launch(
        _ragged_decode, (B * H, splits), q_BQD, keys_ND, values_ND, starts_BH.contiguous(), lengths_BH.contiguous(),
        cos, sin, place, parts.logits, parts.out, parts.norm, scaling,
        *q_BQD.stride()[:2], keys_ND.stride(0), values_ND.stride(0), H, longest, per_split,
        G=Q // H, BLOCK_G=max(16, triton.next_power_of_2(Q // H)), D0=D0, D1=D1, BLOCK_S=block_s,
        ROTATE=0 if cos_SR is None else cos_SR.shape[1], PLACED=place_N is not None, RECEIVED=received,
        UPCAST=tiles.INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts.joined(q_BQD.dtype, H, received)


def packed_decode(
    q_BQD: Tensor,
    rows: PackedRows,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SR: Tensor | None = None,
    sin_SR: Tensor | None = None,
    place_N: Tensor | None = None,
    received: bool = False,
) -> Decoded:
    """See ``reference.packed_decode``."""
    check(q=q_BQD, **rows._asdict())
    B, Q, D = q_BQD.shape
    H, (T, M, _), (P, R, _) = starts_BH.shape[1], rows.key_step_TMD.shape, rows.tail_keys_PRD.shape
    D0, D1 = head_blocks(D, q_BQD.dtype)
    alike = rows.key_zero_TMD.shape == (T, M, D) and rows.key_codes_NX.shape == rows.value_codes_NX.shape
    if Q % H or B * H != P or P % T or not alike:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in rows._asdict().items())
        raise ValueError(f"q {tuple(q_BQD.shape)} of {H} key/value heads does not belong to {shapes}")
    if rows.bits not in (4, 2) or rows.key_codes_NX.dtype != torch.uint8:
        raise ValueError(f"{rows.bits} bits in {rows.key_codes_NX.dtype}: backend='triton' takes 4 or 2 in torch.uint8")
    if rows.tail_keys_PRD.dtype != q_BQD.dtype or rows.tail_values_PRD.dtype != q_BQD.dtype:
        raise ValueError(f"q is {q_BQD.dtype} and the tail is {rows.tail_keys_PRD.dtype}: they must be of one type")
    cos, sin, place = _tables(cos_SR, sin_SR, place_N, longest, q_BQD)
    block_s = 32 if D < 256 else 16
    splits, per_split = _splits(longest, block_s, B * H)
    parts = _parts(q_BQD, splits, longest, received)
    rotation = hadamard(D, q_BQD.device)
    rows = rows._replace(tail_values_PRD=(rows.tail_values_PRD.float() @ rotation).to(q_BQD.dtype))
    tiles.launch(
        _packed_decode, (B * H, splits), q_BQD, *(x.contiguous() for x in rows), starts_BH.contiguous(),
        lengths_BH.contiguous(), cos, sin, place, parts.logits, parts.out, parts.norm, scaling,
        *q_BQD.stride()[:2], H, P // T, M, R, longest, per_split,
        G=Q // H, BLOCK_G=max(16, triton.next_power_of_2(Q // H)), D0=D0, D1=D1, BLOCK_S=block_s, BITS=rows.bits,
        GROUPS=rows.value_step_NC.shape[1], ROTATE=0 if cos_SR is None else cos_SR.shape[1],
        PLACED=place_N is not None, RECEIVED=received, UPCAST=tiles.INTERPRETED,
        num_warps=4 if cos_SR is None else 8, num_stages=2,
    )  # fmt: skip
    made = parts.joined(torch.float32, H, received)
    return made._replace(out_BQD=(made.out_BQD @ rotation).to(q_BQD.dtype))


def _tables(
    cos_SR: Tensor | None, sin_SR: Tensor | None, place_N: Tensor | None, longest: int, q_BQD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The tables and places, contiguous, or stand-ins where keys are not rotated or are rotated by their rank. Of given
    places nothing is known here; none may reach behind the tables."""
    if (cos_SR is None) != (sin_SR is None):
        raise ValueError("cos and sin are given together or not at all")
    if cos_SR is None or sin_SR is None:
        if place_N is not None:
            raise ValueError("place_N is of keys that are rotated: give cos and sin too")
        return q_BQD, q_BQD, q_BQD
    check(cos=cos_SR, sin=sin_SR)
    (rows, R), D = cos_SR.shape, q_BQD.shape[2]
    if cos_SR.shape != sin_SR.shape or R > D or R % 2 or rows < longest:
        raise ValueError(f"cos {tuple(cos_SR.shape)} must be [at least {longest}, even and at most {D}], and sin alike")
    return cos_SR.contiguous(), sin_SR.contiguous(), q_BQD if place_N is None else place_N.contiguous()


def _splits(longest: int, block_s: int, heads: int) -> tuple[int, int]:
    """``(programs for each head, rows of each)``: about 512 programs, none with less than four blocks."""
    check_some("longest", longest, "rows")
    splits = max(1, min(cdiv(longest, 4 * block_s), cdiv(512, heads)))
    per_split = cdiv(cdiv(longest, splits), block_s) * block_s
    return cdiv(longest, per_split), per_split


class _Parts(NamedTuple):
    """What the programs write, all float32."""

    out: Tensor
    """``[splits, B, Q, D]``"""
    norm: Tensor
    """``[splits, B, Q]``: log-sum-exp of a part."""
    logits: Tensor
    """``[B, Q, S]``, scaled and times log2(e), -inf behind a head's rows; a stand-in where they are not wanted."""

    def joined(self, dtype: torch.dtype, H: int, received: bool) -> Decoded:
        """Parts of the output joined by their log-sum-exps, and what each row got."""
        out_BQD, norm_BQ = joined(self.out, self.norm, dtype)
        if not received:
            return Decoded(out_BQD, None)
        weights_BQS = (self.logits - norm_BQ[..., None] * LOG2).exp2()
        return Decoded(out_BQD, weights_BQS.unflatten(1, (H, -1)).mean(2))


def _parts(q_BQD: Tensor, splits: int, longest: int, received: bool) -> _Parts:
    """Room for what the programs write."""
    B, Q, D = q_BQD.shape
    exact = dict(dtype=torch.float32, device=q_BQD.device)
    out, norm = torch.empty(splits, B, Q, D, **exact), torch.empty(splits, B, Q, **exact)
    return _Parts(out, norm, torch.full((B, Q, longest), float("-inf"), **exact) if received else out)
