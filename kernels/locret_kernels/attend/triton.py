"""Sums of attention over queries as Triton kernels, attention over two parts of the rows, joined by one, attention of the newest
queries, and attention over chosen rows; ``__init__.py`` defines them. Other attention is PyTorch's on a card.

A program of ``_column_stats`` owns a block of slots: it holds their keys and walks over the queries that can see them, first
over those that do not see all of the slots. A tile of slots by queries is summed element by element; only after the last block
of queries are its columns added up, so the loop waits for no other warp.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import LOG2E, check, check_heads, dot_rows, head_blocks, load_rows
from . import MARGIN, TILE, Blocks, ColumnStats, causal, check_queries, check_statistics, check_units


@triton.jit
def _read_queries(
    queries, lse, t, k0, k1, zero, slots, total, square, above, scale, margin, stride_qh, stride_qt, T, S,
    G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_T: tl.constexpr, SUM: tl.constexpr, SQUARE: tl.constexpr,
    ABOVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Running statistics of the slots after one more block of queries. Without ``MASKED`` all of them see every slot."""
    rows = t + tl.arange(0, BLOCK_T)  # [BT]
    alive = rows < T
    a = zero  # [BS, BT]: attention, summed over the group
    for g in range(G):
        q0, q1 = load_rows(queries + g * stride_qh, rows, alive, stride_qt, D0, D1)  # [BT, D0], [BT, D1]
        norm = tl.load(lse + g * T + rows, mask=alive, other=float("inf"))  # [BT]: past the last query attention is 0
        a += tl.exp2(dot_rows(k0, k1, q0, q1, zero, D1) * (scale * LOG2E) - (norm * LOG2E)[None, :])
    a *= 1.0 / G
    seen = rows + (S - T + 1)  # [BT]: slots that each query sees
    if MASKED:
        a = tl.where(slots[:, None] < seen[None, :], a, 0.0)
    if SUM:
        total += a  # [BS, BT], and so are the others
    if SQUARE:
        square += a * a
    if ABOVE:
        above += tl.where(a * seen[None, :] > margin, 1.0, 0.0)
    return total, square, above


@triton.jit
def _column_stats(
    q, k, lse, out_sum, out_square, out_above, scale, margin,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, H, T, S,
    G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    SUM: tl.constexpr, SQUARE: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Program axes: blocks of slots (BS of them), key/value heads of all batches; queries are read BT at a time."""
    first_slot = tl.program_id(0) * BLOCK_S
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    slots = first_slot + tl.arange(0, BLOCK_S)  # [BS]
    there = slots < S
    keys = k + b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    k0, k1 = load_rows(keys, slots, there, stride_ks, D0, D1)  # [BS, D0], [BS, D1]
    zero = tl.zeros([BLOCK_S, BLOCK_T], tl.float32)
    queries = q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * G * stride_qh
    lse += tl.program_id(1).to(tl.int64) * G * T
    # Each statistic is a sum over blocks of queries so far, in registers: no atomics, so runs repeat exactly.
    total = zero
    square = zero
    above = zero
    first = tl.maximum(first_slot - (S - T), 0) // BLOCK_T * BLOCK_T  # earlier queries see none of these slots
    # Queries from there on that do not see all of them.
    some = tl.maximum(first_slot + BLOCK_S - 1 - (S - T) - first, 0)
    clear = tl.minimum(first + tl.cdiv(some, BLOCK_T) * BLOCK_T, T)
    for seen in tl.static_range(2):  # these, then those that do
        for t in range(clear if seen else first, T if seen else clear, BLOCK_T):
            total, square, above = _read_queries(
                queries, lse, t, k0, k1, zero, slots, total, square, above, scale, margin, stride_qh, stride_qt, T, S,
                G, D0, D1, BLOCK_T, SUM, SQUARE, ABOVE, seen == 0,
            )  # fmt: skip
    at = tl.program_id(1).to(tl.int64) * S + slots
    if SUM:
        tl.store(out_sum + at, tl.sum(total, 1), mask=there)
    if SQUARE:
        tl.store(out_square + at, tl.sum(square, 1), mask=there)
    if ABOVE:
        tl.store(out_above + at, tl.sum(above, 1), mask=there)


def column_stats(
    q_BQTD: Tensor, k_BHSD: Tensor, scaling: float, lse_BQT: Tensor, *, want: frozenset[str]
) -> ColumnStats:
    """See the definition, ``column_stats``."""
    check_statistics(q_BQTD, k_BHSD, want)
    B, H, G, T, S, D = check_heads(q_BQTD, k_BHSD)
    check(lse=lse_BQT)
    D0, D1 = head_blocks(D, q_BQTD.dtype)
    lse = lse_BQT.contiguous()
    names = ("sum", "square", "above")
    out = {name: torch.empty(B, H, S, dtype=torch.float32, device=q_BQTD.device) for name in names if name in want}
    block_t, block_s = 32 if D < 256 else 16, 128
    common.launch(
        _column_stats, (cdiv(S, block_s), B * H), q_BQTD, k_BHSD, lse, *(out.get(name, lse) for name in names),
        scaling, 1.0 + MARGIN, *q_BQTD.stride()[:3], *k_BHSD.stride()[:3], H, T, S,
        G=G, D0=D0, D1=D1, BLOCK_T=block_t, BLOCK_S=block_s,
        **{name.upper(): name in want for name in names}, num_warps=8, num_stages=3 if D == 128 else 2,
    )  # fmt: skip
    return ColumnStats(**out)


def logits(q_BQTD: Tensor, k_BHSD: Tensor, scaling: float) -> Iterator[tuple[slice, Tensor]]:
    """Some queries at a time: which, and their scaled logits ``[B, H, G, t, S]`` (float32), by PyTorch's product."""
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    if common.INTERPRETED:  # a CPU has no product of half precision with sums of float32
        q_BQTD, k_BHSD = q_BQTD.float(), k_BHSD.float()
    exact = {} if q_BQTD.dtype == torch.float32 else {"out_dtype": torch.float32}
    for part in (slice(start, start + TILE) for start in range(0, T, TILE)):
        rows = q_BQTD[:, :, part].reshape(B * H, -1, D)  # [B * H, G * t, D]
        yield part, torch.bmm(rows, k_BHSD.flatten(0, 1).mT, **exact).mul_(scaling).view(B, H, Q // H, -1, S)


# CIS target: a program owns a block of slots and walks over all answer queries. With ``log_prob`` products of PyTorch give the
# log-sum-exp of some queries at a time before.


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
    """See the definition, ``column_max``."""
    B, H, G, T, S, D = check_heads(q_BQTD, k_BHSD)
    check(q_pos=q_pos_T)
    check_some("q", T, "answer queries")
    D0, D1 = head_blocks(D, q_BQTD.dtype)
    out = torch.empty(B, H, S, dtype=torch.float32, device=q_BQTD.device)
    lse = out  # stands in for what is not read
    if log_prob:
        hidden_TS = torch.arange(S, device=q_BQTD.device) > q_pos_T[:, None]
        parts = logits(q_BQTD, k_BHSD, scaling)
        lse = torch.cat([x.masked_fill_(hidden_TS[part], float("-inf")).logsumexp(-1) for part, x in parts], 3)
    block_t, block_s = (64, 128) if D < 256 else (32, 64)
    common.launch(
        _column_max, (cdiv(S, block_s), B * H), q_BQTD, k_BHSD, q_pos_T, lse, out, scaling,
        *q_BQTD.stride()[:3], *k_BHSD.stride()[:3], H, T, S,
        G=G, D0=D0, D1=D1, BLOCK_T=block_t, BLOCK_S=block_s, LOG_PROB=log_prob, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out


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


# Block-sparse attention: a program owns some queries of one block and walks over the rows that the block attends to, by an index
# of their units.


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
