"""Selection and in-place compaction as Triton kernels; ``reference.py`` defines them.

Selection finds the ``keep``-th largest score bit by bit (32 counts over the row), then writes what is above it and the
newest of what equals it, in order: no sort, no ties left to chance. Compaction reads and writes a block of rows at a time
from the front; since the index ascends, a row is never overwritten before it was read, and rows that stay where they are
cost nothing. Columns are independent, so a head's columns are spread over programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..bounds import check_moves
from ..tiles import cdiv, check
from .reference import check_keep

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Copies are of bits, whatever the type."""


@triton.jit
def _ordered(score, protected, rows, there):
    """Scores as unsigned integers of the same order; a protected row is above every other, a missing one below."""
    x = tl.load(score + rows, mask=there, other=0.0) + 0.0  # -0.0 and 0.0 are equal
    guard = tl.load(protected + rows, mask=there, other=0)
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = bits.to(tl.int64) + 2147483648
    key = tl.where(guard != 0, 4294967295, key)
    return tl.where(there, key, -1)


@triton.jit
def _select_rows(score, protected, index, S, keep, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    score += head * S
    protected += head * S
    index += head * keep
    threshold = tl.zeros([], tl.int64)
    for i in range(32):
        candidate = threshold | (tl.full([], 1, tl.int64) << (31 - i))
        count = 0
        for s in range(0, S, BLOCK):
            rows = s + tl.arange(0, BLOCK)
            count += tl.sum((_ordered(score, protected, rows, rows < S) >= candidate).to(tl.int32), 0)
        threshold = tl.where(count >= keep, candidate, threshold)
    above, equal = 0, 0
    for s in range(0, S, BLOCK):
        rows = s + tl.arange(0, BLOCK)
        key = _ordered(score, protected, rows, rows < S)
        above += tl.sum((key > threshold).to(tl.int32), 0)
        equal += tl.sum((key == threshold).to(tl.int32), 0)
    skip = equal - (keep - above)  # so many of the oldest equal ones go
    written, met = 0, 0
    for s in range(0, S, BLOCK):
        rows = s + tl.arange(0, BLOCK)
        key = _ordered(score, protected, rows, rows < S)
        same = (key == threshold).to(tl.int32)
        rank = met + tl.cumsum(same, 0) - same
        stays = ((key > threshold) | ((same != 0) & (rank >= skip))).to(tl.int32)
        place = written + tl.cumsum(stays, 0) - stays
        tl.store(index + place, rows.to(tl.int64), mask=stays != 0)
        met += tl.sum(same, 0)
        written += tl.sum(stays, 0)


@triton.jit
def _compact_rows(
    x, index, stride_b, stride_h, stride_s, H, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    x += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    index += tl.program_id(0).to(tl.int64) * K
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for j in range(0, K, BLOCK_K):
        target = j + tl.arange(0, BLOCK_K)
        source = tl.load(index + target, mask=target < K, other=0).to(tl.int32)
        moves = ((target < K) & (source != target))[:, None] & (columns < D)[None, :]
        rows = tl.load(x + source[:, None] * stride_s + columns[None, :], mask=moves, other=0)
        tl.debug_barrier()  # every row of the block is read before one is written
        tl.store(x + target[:, None] * stride_s + columns[None, :], rows, mask=moves)
        tl.debug_barrier()


def select_rows(score_BHS: Tensor, protected_BHS: Tensor, keep: int) -> Tensor:
    """See ``reference.select_rows``. Scores may be infinite, not NaN."""
    S = check_keep(score_BHS, keep)
    check(score=score_BHS, protected=protected_BHS)
    B, H = score_BHS.shape[:2]
    score = score_BHS.float().contiguous()
    protected = protected_BHS.expand(B, H, S).contiguous().view(torch.int8)
    index = torch.empty(B, H, keep, dtype=torch.int64, device=score.device)
    tiles.launch(
        _select_rows, (B * H,), score, protected, index, S, keep,
        BLOCK=min(4096, triton.next_power_of_2(S)), num_warps=8, num_stages=1,
    )  # fmt: skip
    return index


def compact_rows(buffers: Sequence[Tensor], index_BHK: Tensor) -> None:
    """See ``reference.compact_rows``."""
    index = index_BHK.contiguous()
    B, H, K = index.shape
    for buffer in buffers:
        check_moves(index, buffer)
        rows = buffer if buffer.dim() == 4 else buffer[..., None]
        bits = rows.view(INTEGERS[rows.element_size()])
        check(index=index, buffer=bits[0, 0])
        D = bits.shape[-1]
        block_d = min(16, triton.next_power_of_2(D))
        block_k = min(512 if D > 1 else 2048, triton.next_power_of_2(K))
        tiles.launch(
            _compact_rows, (B * H, cdiv(D, block_d)), bits, index, *bits.stride()[:3], H, K, D,
            BLOCK_K=block_k, BLOCK_D=block_d, num_warps=8, num_stages=1,
        )  # fmt: skip
