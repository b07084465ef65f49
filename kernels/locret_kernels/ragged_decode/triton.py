"""Decoding attention over flat rows, in full or in few bits, as one Triton kernel; ``__init__.py`` defines it.

The rows of a head are split over programs, so that one token fills the card. Each program leaves its part of the output with its
log-sum-exp, and the last of a head to arrive merges the parts in a fixed order. The queries of a group share every row that is
read, by tensor cores. Where a head has one query, each row of a tile keeps a softmax of its own until the last tile, and no sum
across warps stands in the loop.

Angles add: a row of rank ``s + o`` in a block that begins at ``s`` is turned by ``R(s) R(o)``. ``R(s)`` goes to the query, once a
block, and ``R(o)`` is the same tile in every block and stays in registers. Keys are read as two halves, which turn together.

Codes become numbers in registers: only the bytes of a row in few bits are read, and the levels of its group. Values stay
rotated: those of the tail are rotated before the kernel, and the output is rotated back after it.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import LEAST_BLOCKS, LN2, LOG2E, check, head_blocks, join_parts
from . import BLOCK, Angles, ByteRows, Decoded, PackedRows, Rotation, Rows, Spans, Turn, hadamard

NONE = tl.constexpr(-1.0e30)
"""Logit of no row: below all others, and finite, so that differences are numbers."""
NEAR = tl.constexpr(BLOCK)


@triton.jit
def _angles(cos, sin, rows, keep, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """cos and sin ``[rows, columns]`` (float32) of rows of tables whose rows lie ``2 * HALF`` apart."""
    columns = tl.arange(0, COLUMNS)  # [columns]
    at = rows[:, None] * (2 * HALF) + columns[None, :]  # [rows, columns]
    inside = keep[:, None] & (columns < HALF)[None, :]
    c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    return c, tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _turn(low, high, c, s):
    """Low and high halves of rows, turned by an angle."""
    return low * c - high * s, high * c + low * s


@triton.jit
def _read(base, rows, keep, stride, level, step, zero, tail, first_of_tail, FIRST: tl.constexpr, N: tl.constexpr,
          COLUMNS: tl.constexpr, SHARED: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns ``FIRST .. FIRST + N`` of rows ``[rows, columns]`` (float32).

    They are stored in full, or as codes of ``BITS`` bits. ``SHARED`` codes have one step and one zero point, from
    ``level [rows]`` on. Of fewer than 8 bits the newest rows are in a tail.
    """
    columns = FIRST + tl.arange(0, COLUMNS)  # [columns]
    inside = keep[:, None] & (columns < FIRST + N)[None, :]  # [rows, columns]
    if BITS == 0:
        x = tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0).to(tl.float32)
    else:
        PER_BYTE: tl.constexpr = 8 // BITS
        packed = inside & (rows < first_of_tail)[:, None]
        code = tl.load(base + rows[:, None] * stride + (columns // PER_BYTE)[None, :], mask=packed, other=0)
        code = (code.to(tl.int32) >> ((columns % PER_BYTE) * BITS)[None, :]) & (2**BITS - 1)
        at = level[:, None] + (columns // SHARED)[None, :]  # [rows, columns]
        x = tl.load(zero + at, mask=packed, other=0.0).to(tl.float32)
        x += code.to(tl.float32) * tl.load(step + at, mask=packed, other=0.0).to(tl.float32)
        if BITS < 8:
            newest = inside & (rows >= first_of_tail)[:, None]
            held = tl.load(tail + (rows - first_of_tail)[:, None] * D + columns[None, :], mask=newest, other=0.0)
            x = tl.where(newest, held.to(tl.float32), x)
    return x


@triton.jit(do_not_specialize=["M", "R", "S"])
def _ragged_decode(
    q, keys, values, groups, key_step, key_zero, value_step, value_zero, tail_keys, tail_values, tails, starts, lengths,
    cos, sin, q_cos, q_sin, place, logits, parts, norms, out, norm, arrived, scale, stride_qb, stride_qh, H, stride_k,
    stride_v, M, R, S, G: tl.constexpr, BLOCK_G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, TURN: tl.constexpr,
    PLACED: tl.constexpr, RECEIVED: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Program axes: key/value heads of all batches, splits of a head's rows (read BS at a time). BG is the group, padded; a
    group of one query goes by lanes.

    Keys are read in columns ``A``, ``B`` and ``C``: both halves that turn and what passes, or the two blocks of a head whose rows
    do not turn. ``TURN``: 1 by tables, 2 by angles. Keys in 8 bits have steps of their own as values have, fewer bits those of
    their group.
    """
    D: tl.constexpr = D0 + D1
    LANES: tl.constexpr = BLOCK_G == 1
    SUMS: tl.constexpr = BLOCK_S if LANES else BLOCK_G
    VALUES: tl.constexpr = D // GROUPS
    KEYS: tl.constexpr = VALUES if BITS == 8 else 1
    kind = tl.float32 if common.UPCAST else q.dtype.element_ty
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    start = tl.load(starts + head).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    one = tl.arange(0, 1)  # [1]
    members = tl.arange(0, BLOCK_G)  # [BG]
    alive = members < G
    q += b.to(tl.int64) * stride_qb + (h * G).to(tl.int64) * stride_qh
    qa = _read(q, members, alive, stride_qh, one, q, q, q, 0, 0, A, BLOCK_A, 1, 0, D)  # [BG, BA], float32
    qb = qa
    if B > 0:
        qb = _read(q, members, alive, stride_qh, one, q, q, q, 0, A, B, BLOCK_B, 1, 0, D)  # [BG, BB]
    qc = qa
    if C > 0:
        qc = _read(q, members, alive, stride_qh, one, q, q, q, 0, A + B, C, BLOCK_C, 1, 0, D)  # [BG, BC]
    block = tl.arange(0, BLOCK_S)  # [BS]
    if TURN == 2:  # to the place of the newest row, in two steps
        newest = tl.maximum(length - 1, 0) + one  # [1]
        c, z = _angles(q_cos, q_sin, newest % NEAR, one == 0, A, BLOCK_A)  # [1, BA]
        qa, qb = _turn(qa, qb, c, z)
        c, z = _angles(q_cos, q_sin, newest // NEAR + NEAR, one == 0, A, BLOCK_A)
        qa, qb = _turn(qa, qb, c, z)
        near_c, near_z = _angles(cos, sin, block, block >= 0, A, BLOCK_A)  # [BS, BA]
    keys += start * stride_k
    values += start * stride_v
    place += start
    logits += (head.to(tl.int64) * G + members)[:, None] * S  # [BG, 1] of [B * Q, S]
    first_of_tail = length
    if BITS > 0:
        value_step += start * GROUPS
        value_zero += start * GROUPS
    if BITS == 8:
        key_step += start * GROUPS
        key_zero += start * GROUPS
    elif BITS > 0:
        first_of_tail -= tl.load(tails + head).to(tl.int32)
        groups += start
        key_step += head.to(tl.int64) * M * D
        key_zero += head.to(tl.int64) * M * D
        tail_keys += head.to(tl.int64) * R * D
        tail_values += head.to(tl.int64) * R * D
    # Online softmax: `total` and `y` are sums over the rows so far, scaled by 2**-top; `top` is their largest logit.
    top = tl.full([SUMS], NONE, tl.float32)
    total = tl.zeros([SUMS], tl.float32)
    y0 = tl.zeros([SUMS, D0], tl.float32)
    y1 = tl.zeros([SUMS, D1 if D1 > 0 else 16], tl.float32)
    # By the head's own length, so that a graph splits rows as the same step without one does.
    per_split = tl.maximum(tl.cdiv(tl.cdiv(length, tl.num_programs(1)), BLOCK_S), LEAST_BLOCKS) * BLOCK_S
    begin = split * per_split
    for s in range(begin, tl.minimum(begin + per_split, length), BLOCK_S):
        rows = s + block  # [BS]
        there = (rows < length) & (rows < begin + per_split)
        level = rows * GROUPS
        if BITS == 4 or BITS == 2:
            level = tl.load(groups + rows, mask=there & (rows < first_of_tail), other=0).to(tl.int32) * D  # [BS]
        ka = _read(keys, rows, there, stride_k, level, key_step, key_zero, tail_keys, first_of_tail,
                   0, A, BLOCK_A, KEYS, BITS, D)  # [BS, BA]  # fmt: skip
        kb = ka
        if B > 0:
            kb = _read(keys, rows, there, stride_k, level, key_step, key_zero, tail_keys, first_of_tail,
                       A, B, BLOCK_B, KEYS, BITS, D)  # [BS, BB]  # fmt: skip
        ua, ub = qa, qb
        if TURN == 1:
            places = rows  # their rank, or the given place where it is higher
            if PLACED:
                places = tl.maximum(rows, tl.load(place + rows, mask=there, other=0).to(tl.int32))
            c, z = _angles(cos, sin, places, there, A, BLOCK_A)  # [BS, BA]
            ka, kb = _turn(ka, kb, c, z)
        elif TURN == 2:
            c, z = _angles(cos, sin, one + s // NEAR + NEAR, one == 0, A, BLOCK_A)  # [1, BA]
            ua, ub = _turn(qa, qb, c, -z)  # as the block's first row sees them
            if BLOCK_S < NEAR:
                c, z = _angles(cos, sin, (one + s) % NEAR, one == 0, A, BLOCK_A)
                ua, ub = _turn(ua, ub, c, -z)
            ka, kb = _turn(ka, kb, near_c, near_z)
        if LANES:
            x = tl.sum(ka * ua, 1)  # [BS]
            if B > 0:
                x += tl.sum(kb * ub, 1)
        else:
            x = tl.dot(ua.to(kind), tl.trans(ka.to(kind)), input_precision="ieee")  # [BG, BS]
            if B > 0:
                x = tl.dot(ub.to(kind), tl.trans(kb.to(kind)), x, input_precision="ieee")
        if C > 0:
            kc = _read(keys, rows, there, stride_k, level, key_step, key_zero, tail_keys, first_of_tail,
                       A + B, C, BLOCK_C, KEYS, BITS, D)  # [BS, BC]  # fmt: skip
            if LANES:
                x += tl.sum(kc * qc, 1)
            else:
                x = tl.dot(qc.to(kind), tl.trans(kc.to(kind)), x, input_precision="ieee")
        x *= scale * LOG2E  # to base 2
        if RECEIVED:
            each = x[None, :] if LANES else x  # [BG, BS]
            tl.store(logits + rows[None, :], each, mask=alive[:, None] & there[None, :])
        v0 = _read(values, rows, there, stride_v, rows * GROUPS, value_step, value_zero, tail_values, first_of_tail,
                   0, D0, D0, VALUES, BITS, D)  # [BS, D0]  # fmt: skip
        v1 = v0
        if D1 > 0:
            v1 = _read(values, rows, there, stride_v, rows * GROUPS, value_step, value_zero, tail_values,
                       first_of_tail, D0, D1, D1, VALUES, BITS, D)  # [BS, D1]  # fmt: skip
        if LANES:
            x = tl.where(there, x, NONE)
            new = tl.maximum(top, x)  # [BS]
            weight = tl.where(there, tl.exp2(x - new), 0.0)
            fade = tl.exp2(top - new)
            y0 = y0 * fade[:, None] + weight[:, None] * v0  # [BS, D0]
            if D1 > 0:
                y1 = y1 * fade[:, None] + weight[:, None] * v1  # [BS, D1]
            total = total * fade + weight
        else:
            x = tl.where(there[None, :], x, NONE)
            new = tl.maximum(top, tl.max(x, 1))  # [BG]
            weight = tl.exp2(x - new[:, None])  # [BG, BS]
            fade = tl.exp2(top - new)  # [BG]
            y0 = tl.dot(weight.to(kind), v0.to(kind), y0 * fade[:, None], input_precision="ieee")  # [BG, D0]
            if D1 > 0:
                y1 = tl.dot(weight.to(kind), v1.to(kind), y1 * fade[:, None], input_precision="ieee")  # [BG, D1]
            total = total * fade + tl.sum(weight, 1)
        top = new
    if LANES:
        most = tl.max(top, 0, keep_dims=True)  # [1]
        fade = tl.exp2(top - most)  # [BS]
        top = most
        total = tl.sum(total * fade, 0, keep_dims=True)  # [1]
        y0 = tl.sum(y0 * fade[:, None], 0, keep_dims=True)  # [1, D0]
        y1 = tl.sum(y1 * fade[:, None], 0, keep_dims=True)
    # A part with its log-sum-exp; one without rows weighs nothing.
    at = (split.to(tl.int64) * tl.num_programs(0) + head) * G + members  # [BG] of [splits, B * Q]
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    share = (1.0 / total)[:, None]  # [BG, 1]
    tl.store(norms + at, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2), mask=alive)
    tl.store(parts + at[:, None] * D + tl.arange(0, D0)[None, :], y0 * share, mask=alive[:, None])
    if D1 > 0:
        tl.store(parts + at[:, None] * D + D0 + tl.arange(0, D1)[None, :], y1 * share, mask=alive[:, None])
    tl.debug_barrier()  # the part is whole before the program says that it has arrived
    if tl.atomic_add(arrived + head, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived + head, 0)  # for the next launch
        for g in range(G):
            n = head.to(tl.int64) * G + g
            join_parts(parts, norms, out, norm, n, tl.num_programs(0) * G, tl.num_programs(1), D0, D1, JOIN)


def _full(q_BQD: Tensor, rows: tuple[Tensor, ...], spans: Spans) -> tuple[Tensor, ...]:
    """Rows in full or in 8 bits as the kernel takes them, checked."""
    keys_ND, values_ND, *levels = rows
    check(q=q_BQD, keys=keys_ND, values=values_ND, longest=spans.longest)
    Q, D, H = *q_BQD.shape[1:], spans.starts_BH.shape[1]
    if Q % H or keys_ND.shape[1] != D or values_ND.shape != keys_ND.shape:
        shapes = f"keys {tuple(keys_ND.shape)} and values {tuple(values_ND.shape)}"
        raise ValueError(f"q {tuple(q_BQD.shape)}, {shapes} do not belong together")
    if not (torch.uint8 if levels else q_BQD.dtype) == keys_ND.dtype == values_ND.dtype:
        raise ValueError("q, keys and values must be of one type, or keys and values torch.uint8 with their steps")
    form = (torch.float16, levels[0].shape, True) if levels else None
    if levels and ({(x.dtype, x.shape, x.is_contiguous()) for x in levels} != {form} or D % levels[0].shape[1]):
        raise ValueError(f"steps {tuple(levels[0].shape)} must be float16, as many of keys as of values")
    none = q_BQD  # stands in for what the kernel does not read
    return keys_ND, values_ND, none, *(levels or [none] * 4), none, none, none


def _packed(q_BQD: Tensor, rows: PackedRows, spans: Spans) -> tuple[Tensor, ...]:
    """Rows in 4 or 2 bits as the kernel takes them, checked; the tail's values are rotated as the others are."""
    check(q=q_BQD, longest=spans.longest, **rows._asdict())
    (B, Q, D), H = q_BQD.shape, spans.starts_BH.shape[1]
    P, M, _ = rows.key_step_PMD.shape
    alike = rows.key_zero_PMD.shape == (P, M, D) and rows.key_codes_NX.shape == rows.value_codes_NX.shape
    if Q % H or not B * H == P == len(rows.tail_keys_PRD) or not alike:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in rows._asdict().items())
        raise ValueError(f"q {tuple(q_BQD.shape)} of {H} key/value heads does not belong to {shapes}")
    if rows.bits not in (4, 2) or rows.key_codes_NX.dtype != torch.uint8:
        raise ValueError(f"{rows.bits} bits in {rows.key_codes_NX.dtype}: backend='triton' takes 4 or 2 in torch.uint8")
    if rows.tail_keys_PRD.dtype != q_BQD.dtype or rows.tail_values_PRD.dtype != q_BQD.dtype:
        raise ValueError(f"q is {q_BQD.dtype} and the tail is {rows.tail_keys_PRD.dtype}: they must be of one type")
    tail = (rows.tail_values_PRD.float() @ hadamard(D, q_BQD.device)).to(q_BQD.dtype)
    return tuple(x.contiguous() for x in rows._replace(tail_values_PRD=tail))


@cache
def _arrived(heads: int, device: torch.device) -> Tensor:
    """Arrived programs of each head ``[heads]`` (int32): 0 between launches. One launch at a time runs on a device. Never
    freed, since CUDA graphs hold the address."""
    with torch.inference_mode(False):
        return torch.zeros(heads, dtype=torch.int32, device=device)


def ragged_decode(
    q_BQD: Tensor, rows: Rows, spans: Spans, scaling: float, turn: Turn = None, received: bool = False
) -> Decoded:
    """See the definition, ``ragged_decode``."""
    bits, groups, sizes, few = 0, 1, (1, 1), isinstance(rows, PackedRows)
    if isinstance(rows, PackedRows):
        given, bits = _packed(q_BQD, rows, spans), rows.bits
        sizes = rows.key_step_PMD.shape[1], rows.tail_keys_PRD.shape[1]
    else:
        given = _full(q_BQD, rows, spans)
    if isinstance(rows, PackedRows | ByteRows):
        bits, groups = bits or 8, rows.value_step_NC.shape[1]
    (B, Q, D), (starts_BH, lengths_BH, longest) = q_BQD.shape, spans
    H = starts_BH.shape[1]
    D0, D1 = head_blocks(D, q_BQD.dtype)
    check_some("longest", longest, "rows")
    # `q` stands in for tables that the kernel does not read. Given places may not reach past the tables; nothing checks that.
    tables, A, B_, C = [q_BQD] * 5, D0, D1, 0
    if turn is not None:
        check(**{name: x for name, x in turn._asdict().items() if x is not None})
        turn.check(longest, D)
        if isinstance(turn, Angles):
            tables[:4], A = [x.contiguous()[:, i] for x in turn for i in range(2)], turn.keys_X2C.shape[2]
        else:
            tables[:2], A = [x.contiguous() for x in turn[:2]], turn.cos_SR.shape[1] // 2
            tables[4] = q_BQD if turn.place_N is None else turn.place_N.contiguous()
        B_, C = A, D - 2 * A
    G = Q // H
    block_s = 16 if few and D == 256 else BLOCK if few or turn is not None or G == 1 or D == 256 else 64
    # All run at once: a third of them where programs have eight warps, two thirds with 8 bits and
    # groups or wide heads (compile_table.csv).
    warps, thirds = (8, 1) if few or D == 256 else (4, 2 if bits == 8 and (G > 1 or D > 64) else 3)
    most = max(1, common.programs(q_BQD.device) * thirds // 3 // (B * H))
    splits = min(cdiv(longest, LEAST_BLOCKS.value * block_s), most)
    exact = dict(dtype=torch.float32, device=q_BQD.device)
    parts, norms = torch.empty(splits, B, Q, D, **exact), torch.empty(splits, B, Q, **exact)
    # Values in few bits are rotated back once more, in float32.
    out, norm_BQ = q_BQD.new_empty(B, Q, D, dtype=torch.float32 if few else None), torch.empty(B, Q, **exact)
    logits_BQS = torch.full((B, Q, longest), float("-inf"), **exact) if received else norms
    arrived = _arrived(triton.next_power_of_2(max(B * H, 1024)), q_BQD.device)
    wide = [max(16, triton.next_power_of_2(n)) for n in (A, B_, C)]
    common.launch(
        _ragged_decode, (B * H, splits), q_BQD, *given, starts_BH.contiguous(), lengths_BH.contiguous(), *tables,
        logits_BQS, parts, norms, out, norm_BQ, arrived, scaling, *q_BQD.stride()[:2], H,
        given[0].stride(0), given[1].stride(0), *sizes, longest,
        G=G, BLOCK_G=1 if G == 1 else max(16, triton.next_power_of_2(G)), D0=D0, D1=D1, A=A, B=B_, C=C, BLOCK_A=wide[0],
        BLOCK_B=wide[1], BLOCK_C=wide[2], BLOCK_S=block_s, BITS=bits, GROUPS=groups,
        TURN=0 if turn is None else 2 if isinstance(turn, Angles) else 1,
        PLACED=isinstance(turn, Rotation) and turn.place_N is not None, RECEIVED=received,
        JOIN=64 if most > 16 else 16, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if few:
        out = (out @ hadamard(D, q_BQD.device)).to(q_BQD.dtype)
    if not received:
        return Decoded(out, None)
    norm_BQ1 = norm_BQ.masked_fill(norm_BQ.isneginf(), 0.0)[..., None]  # heads without rows: -inf - -inf is NaN
    weights_BQS = (logits_BQS - norm_BQ1 * LOG2E.value).exp2()
    return Decoded(out, weights_BQS.unflatten(1, (H, -1)).mean(2))
