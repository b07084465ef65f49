"""Column statistics as Triton kernels; ``__init__.py`` defines them.

A program of ``_column_stats`` owns a block of slots: it holds their keys and walks over the queries that can see them, first
over those that do not see all of the slots. A tile of slots by queries is summed element by element; only after the last block
of queries are its columns added up, so the loop waits for no other warp.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_some, common
from ..common import LOG2E, check, check_heads, dot_rows, head_blocks, load_rows
from . import MARGIN, TILE, ColumnStats, check_statistics


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
