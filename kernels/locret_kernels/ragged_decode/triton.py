"""Decoding attention over flat rows, in full or in few bits, as Triton kernels; ``__init__.py`` defines them.

The rows of a head are split over programs, so that one token fills the card. Each program returns its part of the output with
its log-sum-exp, and the parts are merged in a fixed order. The queries of a group share every row that is read.

Codes become numbers in registers: only the bytes of a row in few bits are read, and the levels of its group. Values stay
rotated: those of the tail are rotated before the kernel, and the output is rotated back after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import check_some, common
from ..common import LN2, LOG2E, check, dot_rows, head_blocks, load_rows, merge_splits, split_rows
from . import Decoded, Float8Rows, FullRows, PackedRows, Rotation, Spans, check_tables, hadamard


@triton.jit
def _partner(columns, R: tl.constexpr):
    """The column that rotation of the first ``R`` pairs each column with; from ``R`` on its own."""
    HALF: tl.constexpr = R // 2
    return tl.where(columns < HALF, columns + HALF, tl.where(columns < R, columns - HALF, columns))


@triton.jit
def _rotated(x, base, rows, places, keep, stride, cos, sin, FIRST: tl.constexpr, N: tl.constexpr,
             R: tl.constexpr, FLOAT8: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of rows whose first ``R`` columns are rotated to their places; ``x [rows, N]`` before."""
    columns = FIRST + tl.arange(0, N)  # [N]
    partner = _partner(columns, R)  # [N]
    other = tl.load(base + rows[:, None] * stride + partner[None, :], mask=keep[:, None], other=0)
    other = _float8(other) if FLOAT8 else other.to(tl.float32)
    other = tl.where((columns < R // 2)[None, :], -other, other)  # [rows, N]
    return _turn(x.to(tl.float32), other, cos, sin, places, keep, FIRST, N, R).to(x.dtype)


@triton.jit
def _turn(x, other, cos, sin, places, keep, FIRST: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """Columns ``x`` and their signed partners ``other``, both ``[rows, N]``, turned by the angles of their places (float32)."""
    columns = FIRST + tl.arange(0, N)  # [N]
    inside = keep[:, None] & (columns < R)[None, :]  # [rows, N]; others turn by angle 0
    at = places[:, None] * R + (columns % (R // 2))[None, :]  # [rows, N]; both halves of a table are alike
    c = tl.load(cos + at, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    return x * c + other * s


@triton.jit
def _places(place, rows, keep, PLACED: tl.constexpr):
    """Places ``[rows]`` to which rows are rotated: their rank, or the given place where it is higher."""
    if PLACED:
        return tl.maximum(rows, tl.load(place + rows, mask=keep, other=0).to(tl.int32))
    return rows


@triton.jit
def _float8(codes):
    """Numbers (float32) of E4M3 codes: their bits are those of a float16, whose exponent counts from 8 more. No card's own
    conversion is needed."""
    bits = codes.to(tl.int32)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _ragged_decode(
    q, keys, values, key_scale, value_scale, starts, lengths, cos, sin, place, logits, out, norm, scale, stride_qb,
    stride_qh, H, stride_k, stride_v, S, per_split, G: tl.constexpr, BLOCK_G: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, BLOCK_S: tl.constexpr, ROTATE: tl.constexpr, PLACED: tl.constexpr,
    RECEIVED: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Program axes: key/value heads of all batches, splits of a head's rows (read BS at a time). BG is the group, padded. The
    scales of 8-bit rows are factors of the logits and of the output."""
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    start = tl.load(starts + head).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    members = tl.arange(0, BLOCK_G)  # [BG]
    alive = members < G
    q0, q1 = load_rows(  # [BG, D0], [BG, D1]
        q + b.to(tl.int64) * stride_qb + (h * G).to(tl.int64) * stride_qh, members, alive, stride_qh, D0, D1
    )
    keys += start * stride_k
    values += start * stride_v
    place += start
    logits += (head.to(tl.int64) * G + members)[:, None] * S  # [BG, 1] of [B * Q, S]
    larger = 1.0  # factor of the values
    if FLOAT8:
        scale *= tl.load(key_scale + head)
        larger = tl.load(value_scale + head)
    zero = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    # Online softmax, see `_absorb`.
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    y0 = tl.zeros([BLOCK_G, D0], tl.float32)
    y1 = tl.zeros([BLOCK_G, D1 if D1 > 0 else 16], tl.float32)
    begin = split * per_split
    for s in range(begin, tl.minimum(begin + per_split, length), BLOCK_S):
        rows = s + tl.arange(0, BLOCK_S)  # [BS]
        there = (rows < length) & (rows < begin + per_split)
        k0, k1 = load_rows(keys, rows, there, stride_k, D0, D1)  # [BS, D0], [BS, D1]
        if FLOAT8:
            k0, k1 = _float8(k0).to(q0.dtype), _float8(k1).to(q0.dtype)
        if ROTATE > 0:
            places = _places(place, rows, there, PLACED)
            k0 = _rotated(k0, keys, rows, places, there, stride_k, cos, sin, 0, D0, ROTATE, FLOAT8)
            if D1 > 0:
                k1 = _rotated(k1, keys, rows, places, there, stride_k, cos, sin, D0, D1, ROTATE, FLOAT8)
        x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2E)  # [BG, BS]: logits to base 2
        if RECEIVED:
            tl.store(logits + rows[None, :], x, mask=alive[:, None] & there[None, :])
        x = tl.where(there[None, :], x, float("-inf"))
        v0, v1 = load_rows(values, rows, there, stride_v, D0, D1)  # [BS, D0], [BS, D1]
        if FLOAT8:
            v0, v1 = _float8(v0).to(q0.dtype), _float8(v1).to(q0.dtype)
        top, total, y0, y1 = _absorb(x, v0, v1, top, total, y0, y1, D1)
    at = (split.to(tl.int64) * tl.num_programs(0) + head) * G + members  # [BG] of [splits, B * Q]
    _store_part(out, norm, at, alive, top, total, y0 * larger, y1 * larger, D0, D1)


@triton.jit
def _absorb(x, v0, v1, top, total, y0, y1, D1: tl.constexpr):
    """Running maximum, sum and output of a softmax after one more block: logits ``x [BG, BS]`` to base 2, values ``[BS, D]``.

    ``total`` and ``y`` are sums over the rows so far, scaled by ``2**-top``. A block has a row, so ``new`` is finite.
    """
    new = tl.maximum(top, tl.max(x, 1))  # [BG]
    weight = tl.exp2(x - new[:, None])  # [BG, BS]
    fade = tl.exp2(top - new)  # [BG]
    y0 = tl.dot(weight.to(v0.dtype), v0, y0 * fade[:, None], input_precision="ieee")  # [BG, D0]
    if D1 > 0:
        y1 = tl.dot(weight.to(v1.dtype), v1, y1 * fade[:, None], input_precision="ieee")  # [BG, D1]
    return new, total * fade + tl.sum(weight, 1), y0, y1


@triton.jit
def _store_part(out, norm, at, alive, top, total, y0, y1, D0: tl.constexpr, D1: tl.constexpr):
    """A part of the output with its log-sum-exp; a part without rows weighs nothing."""
    D: tl.constexpr = D0 + D1
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    share = 1.0 / total  # [BG]
    tl.store(norm + at, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2), mask=alive)
    tl.store(out + at[:, None] * D + tl.arange(0, D0)[None, :], y0 * share[:, None], mask=alive[:, None])
    if D1 > 0:
        tl.store(out + at[:, None] * D + D0 + tl.arange(0, D1)[None, :], y1 * share[:, None], mask=alive[:, None])


@triton.jit
def _numbers(codes, rows, columns, keep, step, zero, BITS: tl.constexpr, D: tl.constexpr):
    """Numbers ``[rows, columns]`` (float32) of rows of codes; ``step`` and ``zero`` are pointers of that shape."""
    PER_BYTE: tl.constexpr = 8 // BITS
    mask = keep[:, None]
    at = codes + rows[:, None] * (D // PER_BYTE) + (columns // PER_BYTE)[None, :]  # [rows, columns]
    shift = (columns % PER_BYTE) * BITS  # [columns]
    code = (tl.load(at, mask=mask, other=0).to(tl.int32) >> shift[None, :]) & (2**BITS - 1)
    low = tl.load(zero, mask=mask, other=0.0).to(tl.float32)  # [rows, columns]
    return low + code.to(tl.float32) * tl.load(step, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _keys(codes, group, step, zero, tail, rows, first_of_tail, packed, newest, FIRST: tl.constexpr, N: tl.constexpr,
          TURN: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of keys ``[rows, N]``, from their codes or from the tail (float32). With ``TURN`` above 0
    the columns that rotation of the first ``TURN`` pairs them with, sign included."""
    columns = FIRST + tl.arange(0, N)  # [N]
    low = columns < TURN // 2
    if TURN > 0:
        columns = _partner(columns, TURN)
    level = group[:, None] * D + columns[None, :]  # [rows, N]
    x = _numbers(codes, rows, columns, packed, step + level, zero + level, BITS, D)  # [rows, N]
    held = tl.load(tail + (rows - first_of_tail)[:, None] * D + columns[None, :], mask=newest[:, None], other=0.0)
    x = tl.where(packed[:, None], x, held.to(tl.float32))
    if TURN > 0:
        x = tl.where(low[None, :], -x, x)
    return x


@triton.jit
def _turned_keys(codes, group, step, zero, tail, rows, first_of_tail, packed, newest, cos, sin, places, keep,
                 FIRST: tl.constexpr, N: tl.constexpr, ROTATE: tl.constexpr, BITS: tl.constexpr,
                 D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of keys ``[rows, N]``, rotated where ``ROTATE`` is above 0 (float32)."""
    x = _keys(codes, group, step, zero, tail, rows, first_of_tail, packed, newest, FIRST, N, 0, BITS, D)
    if ROTATE > 0:
        other = _keys(codes, group, step, zero, tail, rows, first_of_tail, packed, newest, FIRST, N, ROTATE, BITS, D)
        x = _turn(x, other, cos, sin, places, keep, FIRST, N, ROTATE)
    return x


@triton.jit
def _values(codes, step, zero, tail, rows, first_of_tail, packed, newest, FIRST: tl.constexpr, N: tl.constexpr,
            GROUPS: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of values ``[rows, N]``, from their codes or from the tail (float32)."""
    columns = FIRST + tl.arange(0, N)  # [N]
    level = rows[:, None] * GROUPS + (columns // (D // GROUPS))[None, :]  # [rows, N]
    x = _numbers(codes, rows, columns, packed, step + level, zero + level, BITS, D)
    held = tl.load(tail + (rows - first_of_tail)[:, None] * D + columns[None, :], mask=newest[:, None], other=0.0)
    return tl.where(packed[:, None], x, held.to(tl.float32))


@triton.jit
def _packed_decode(
    q, key_codes, value_codes, groups, key_step, key_zero, value_step, value_zero, tail_keys, tail_values, tails,
    starts, lengths, cos, sin, place, logits, out, norm, scale, stride_qb, stride_qh, H, M, R, S, per_split,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_S: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, ROTATE: tl.constexpr, PLACED: tl.constexpr,
    RECEIVED: tl.constexpr,
):  # fmt: skip
    """As ``_ragged_decode``; rows before ``first_of_tail`` are codes, those from there on are in the tail."""
    D: tl.constexpr = D0 + D1
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    start = tl.load(starts + head).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    first_of_tail = length - tl.load(tails + head).to(tl.int32)
    members = tl.arange(0, BLOCK_G)  # [BG]
    alive = members < G
    q0, q1 = load_rows(  # [BG, D0], [BG, D1]
        q + b.to(tl.int64) * stride_qb + (h * G).to(tl.int64) * stride_qh, members, alive, stride_qh, D0, D1
    )
    key_codes += start * (D * BITS // 8)
    value_codes += start * (D * BITS // 8)
    value_step += start * GROUPS
    value_zero += start * GROUPS
    groups += start
    place += start
    logits += (head.to(tl.int64) * G + members)[:, None] * S  # [BG, 1] of [B * Q, S]
    key_step += head.to(tl.int64) * M * D
    key_zero += head.to(tl.int64) * M * D
    tail_keys += head.to(tl.int64) * R * D
    tail_values += head.to(tl.int64) * R * D
    zero = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    # Online softmax, see `_absorb`.
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    y0 = tl.zeros([BLOCK_G, D0], tl.float32)
    y1 = tl.zeros([BLOCK_G, D1 if D1 > 0 else 16], tl.float32)
    begin = split * per_split
    for s in range(begin, tl.minimum(begin + per_split, length), BLOCK_S):
        rows = s + tl.arange(0, BLOCK_S)  # [BS]
        there = (rows < length) & (rows < begin + per_split)
        packed, newest = there & (rows < first_of_tail), there & (rows >= first_of_tail)  # [BS], disjoint
        group = tl.load(groups + rows, mask=packed, other=0).to(tl.int32)  # [BS]
        places = _places(place, rows, there, PLACED)  # [BS]
        k0 = _turned_keys(key_codes, group, key_step, key_zero, tail_keys, rows, first_of_tail, packed, newest,
                          cos, sin, places, there, 0, D0, ROTATE, BITS, D).to(q0.dtype)  # fmt: skip
        k1 = k0
        if D1 > 0:
            k1 = _turned_keys(key_codes, group, key_step, key_zero, tail_keys, rows, first_of_tail, packed, newest,
                              cos, sin, places, there, D0, D1, ROTATE, BITS, D).to(q0.dtype)  # fmt: skip
        x = dot_rows(q0, q1, k0, k1, zero, D1) * (scale * LOG2E)  # [BG, BS]: logits to base 2
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
    at = (split.to(tl.int64) * tl.num_programs(0) + head) * G + members  # [BG] of [splits, B * Q]
    _store_part(out, norm, at, alive, top, total, y0, y1, D0, D1)


def ragged_decode(
    q_BQD: Tensor,
    rows: FullRows | Float8Rows,
    spans: Spans,
    scaling: float,
    turn: Rotation | None = None,
    received: bool = False,
) -> Decoded:
    """See the definition, ``ragged_decode``."""
    keys_ND, values_ND, *scales = rows
    check(q=q_BQD, keys=keys_ND, values=values_ND, longest=spans.longest)
    Q, D, H = *q_BQD.shape[1:], spans.starts_BH.shape[1]
    if Q % H or keys_ND.shape[1] != D or values_ND.shape != keys_ND.shape:
        shapes = f"keys {tuple(keys_ND.shape)} and values {tuple(values_ND.shape)}"
        raise ValueError(f"q {tuple(q_BQD.shape)}, {shapes} do not belong together")
    if not (torch.uint8 if scales else q_BQD.dtype) == keys_ND.dtype == values_ND.dtype:
        raise ValueError("q, keys and values must be of one type, or keys and values torch.uint8 with their scales")
    if any(x.dtype != torch.float32 or x.shape != (spans.starts_BH.numel(),) for x in scales):
        raise ValueError(
            f"scales {tuple(scales[0].shape)} must be float32, one for each of {spans.starts_BH.numel()} heads"
        )
    # Rotating takes each key's partner too, so half the rows fit into the same registers.
    block_s = (64 if D < 256 else 32) // (1 if turn is None else 2)
    strides = keys_ND.stride(0), values_ND.stride(0)
    given = (keys_ND, values_ND, *(scales or (q_BQD, q_BQD)))  # `q` stands in for scales that the kernel does not read
    return _launch(
        _ragged_decode, q_BQD, given, strides, spans, scaling, turn, received, q_BQD.dtype, block_s, FLOAT8=bool(scales)
    )  # fmt: skip


def packed_decode(
    q_BQD: Tensor, rows: PackedRows, spans: Spans, scaling: float, turn: Rotation | None = None, received: bool = False
) -> Decoded:
    """See the definition, ``packed_decode``."""
    check(q=q_BQD, longest=spans.longest, **rows._asdict())
    (B, Q, D), H = q_BQD.shape, spans.starts_BH.shape[1]
    (P, M, _), R = rows.key_step_PMD.shape, rows.tail_keys_PRD.shape[1]
    alike = rows.key_zero_PMD.shape == (P, M, D) and rows.key_codes_NX.shape == rows.value_codes_NX.shape
    if Q % H or not B * H == P == len(rows.tail_keys_PRD) or not alike:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in rows._asdict().items())
        raise ValueError(f"q {tuple(q_BQD.shape)} of {H} key/value heads does not belong to {shapes}")
    if rows.bits not in (4, 2) or rows.key_codes_NX.dtype != torch.uint8:
        raise ValueError(f"{rows.bits} bits in {rows.key_codes_NX.dtype}: backend='triton' takes 4 or 2 in torch.uint8")
    if rows.tail_keys_PRD.dtype != q_BQD.dtype or rows.tail_values_PRD.dtype != q_BQD.dtype:
        raise ValueError(f"q is {q_BQD.dtype} and the tail is {rows.tail_keys_PRD.dtype}: they must be of one type")
    rotation = hadamard(D, q_BQD.device)
    rows = rows._replace(tail_values_PRD=(rows.tail_values_PRD.float() @ rotation).to(q_BQD.dtype))
    made = _launch(
        _packed_decode, q_BQD, [x.contiguous() for x in rows], (M, R), spans, scaling, turn, received,
        torch.float32, 32 if D < 256 else 16, num_warps=4 if turn is None else 8, BITS=rows.bits,
        GROUPS=rows.value_step_NC.shape[1],
    )  # fmt: skip
    return made._replace(out_BQD=(made.out_BQD @ rotation).to(q_BQD.dtype))


def _launch(
    kernel: triton.KernelInterface[object], q_BQD: Tensor, rows: Sequence[Tensor], sizes: tuple[int, ...], spans: Spans,
    scaling: float, turn: Rotation | None, received: bool, dtype: torch.dtype, block_s: int, num_warps: int = 4,
    **constants: int,
) -> Decoded:  # fmt: skip
    """Run one of the kernels over ``rows``, whose ``sizes`` it takes too, and merge the splits into an output of ``dtype``."""
    (B, Q, D), (starts_BH, lengths_BH, longest) = q_BQD.shape, spans
    H = starts_BH.shape[1]
    D0, D1 = head_blocks(D, q_BQD.dtype)
    check_some("longest", longest, "rows")
    if turn is not None:
        check(cos=turn.cos_SR, sin=turn.sin_SR)
        check_tables(turn.cos_SR, turn.sin_SR, longest, D)
    # `q` stands in for tables that the kernel does not read. Given places may not reach past the tables; nothing checks that.
    cos, sin, place = (q_BQD if x is None else x.contiguous() for x in turn or (None,) * 3)
    splits, per_split = split_rows(longest, block_s, B * H)
    exact = dict(dtype=torch.float32, device=q_BQD.device)
    out, norm = torch.empty(splits, B, Q, D, **exact), torch.empty(splits, B, Q, **exact)
    logits_BQS = torch.full((B, Q, longest), float("-inf"), **exact) if received else out
    common.launch(
        kernel, (B * H, splits), q_BQD, *rows, starts_BH.contiguous(), lengths_BH.contiguous(), cos, sin, place,
        logits_BQS, out, norm, scaling, *q_BQD.stride()[:2], H, *sizes, longest, per_split,
        G=Q // H, BLOCK_G=max(16, triton.next_power_of_2(Q // H)), D0=D0, D1=D1, BLOCK_S=block_s, **constants,
        ROTATE=0 if turn is None else turn.cos_SR.shape[1], PLACED=turn is not None and turn.place_N is not None,
        RECEIVED=received, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    out_BQD, norm_BQ = merge_splits(out, norm, dtype)
    if not received:
        return Decoded(out_BQD, None)
    norm_BQ1 = norm_BQ.masked_fill(norm_BQ.isneginf(), 0.0)[..., None]  # heads without rows: -inf - -inf is NaN
    weights_BQS = (logits_BQS - norm_BQ1 * LOG2E.value).exp2()
    return Decoded(out_BQD, weights_BQS.unflatten(1, (H, -1)).mean(2))
