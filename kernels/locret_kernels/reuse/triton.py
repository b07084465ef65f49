"""Reuse of freed rows as two Triton kernels; ``reference.py`` defines them.

What moves is at most what came since the last eviction, wherever it goes to: copies of rows that are in nobody's way, so
every block of them is a program's own, and no program waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import common
from ..checks import check_reuse
from ..common import check
from ..compact.triton import INTEGERS


@triton.jit
def _reuse_rows(
    stay, row, slot, source, target, moved, stride_b, stride_h, H, S, C, K, M, BLOCK: tl.constexpr
):  # fmt: skip
    """A program owns one head, and reads BS slots of it at a time."""
    head = tl.program_id(0).to(tl.int64)
    at = (head // H) * stride_b + (head % H) * stride_h
    row += at
    slot += at
    stay += head * S
    source += head * M
    target += head * M
    moved += head * M
    block = tl.arange(0, BLOCK)  # [BS]
    kept = 0  # slots that stay, in the blocks before
    moves = 0  # those of them whose row is beyond K
    frees = 0  # rows before K whose slot goes
    for s in range(0, S, BLOCK):
        there = s + block < S
        stays = tl.load(stay + s + block, mask=there, other=0) != 0  # [BS]
        here = tl.load(row + s + block, mask=there, other=0).to(tl.int32)  # [BS]
        tl.debug_barrier()  # slots move down, so what was read of this block may be overwritten now
        new = kept + tl.cumsum(stays.to(tl.int32), 0) - 1  # [BS]
        beyond = stays & (here >= K)
        inside = stays & (here < K)
        free = there & (here < K) & ~stays
        m = moves + tl.cumsum(beyond.to(tl.int32), 0) - 1  # [BS]
        tl.store(source + m, here, mask=beyond & (m < M))
        tl.store(moved + m, new, mask=beyond & (m < M))
        f = frees + tl.cumsum(free.to(tl.int32), 0) - 1  # [BS]
        tl.store(target + f, here, mask=free & (f < M))
        tl.store(row + new, here, mask=inside & (new < K))
        tl.store(slot + here, new, mask=inside & (new < K))
        kept += tl.sum(stays.to(tl.int32), 0)
        moves += tl.sum(beyond.to(tl.int32), 0)
        frees += tl.sum(free.to(tl.int32), 0)
    tl.debug_barrier()  # the lists are whole
    for m in range(0, M, BLOCK):
        some = m + block < tl.minimum(moves, M)
        to = tl.load(target + m + block, mask=some, other=0)  # [BS]
        new = tl.load(moved + m + block, mask=some, other=0)  # [BS]
        tl.store(row + new, to, mask=some)
        tl.store(slot + to, new, mask=some)
        none = (m + block >= moves) & (m + block < M)
        tl.store(source + m + block, -1, mask=none)
        tl.store(target + m + block, -1, mask=none)
    for c in range(K, C, BLOCK):
        tl.store(row + c + block, c + block, mask=c + block < C)
        tl.store(slot + c + block, c + block, mask=c + block < C)


@triton.jit
def _move_rows(
    x, source, target, stride_b, stride_h, stride_s, H, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program axes: heads of all batches, blocks of moves (BM of them), blocks of columns (BD of them)."""
    head = tl.program_id(0).to(tl.int64)
    x += (head // H) * stride_b + (head % H) * stride_h
    moves = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    columns = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BD]
    first = tl.load(source + head * M + moves, mask=moves < M, other=-1)  # [BM]
    to = tl.load(target + head * M + moves, mask=moves < M, other=0)  # [BM]
    some = (first >= 0)[:, None] & (columns < D)[None, :]  # [BM, BD]
    rows = tl.load(x + first[:, None] * stride_s + columns[None, :], mask=some, other=0)  # [BM, BD]
    tl.store(x + to[:, None] * stride_s + columns[None, :], rows, mask=some)


def reuse_rows(stay_BHS: Tensor, row_BHC: Tensor, slot_BHC: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """See ``reference.reuse_rows``."""
    check_reuse(stay_BHS, row_BHC, slot_BHC, keep)
    stay = stay_BHS.contiguous().view(torch.uint8)
    check(stay=stay, row=row_BHC, slot=slot_BHC)
    (B, H, S), C = stay.shape, row_BHC.shape[-1]
    most = min(keep, S - keep)
    source, target, moved = (torch.empty(B, H, most, dtype=torch.int32, device=stay.device) for _ in range(3))
    common.launch(
        _reuse_rows, (B * H,), stay, row_BHC, slot_BHC, source, target, moved, *row_BHC.stride()[:2], H, S, C, keep, most,
        BLOCK=min(2048, triton.next_power_of_2(S)), num_warps=8, num_stages=1,
    )  # fmt: skip
    return source, target


def move_rows(buffers: Sequence[Tensor], source_BHM: Tensor, target_BHM: Tensor) -> None:
    """See ``reference.move_rows``."""
    source, target = source_BHM.contiguous(), target_BHM.contiguous()
    B, H, M = source.shape
    if not M:
        return
    for buffer in buffers:
        rows = buffer if buffer.dim() == 4 else buffer[..., None]
        bits = rows.view(INTEGERS[rows.element_size()])
        check(source=source, target=target, buffer=bits[0, 0])
        D = bits.shape[-1]
        block_d = min(128, triton.next_power_of_2(D))
        block_m = min(4096 // block_d, triton.next_power_of_2(M))
        common.launch(
            _move_rows, (B * H, cdiv(M, block_m), cdiv(D, block_d)), bits, source, target, *bits.stride()[:3], H, M, D,
            BLOCK_M=block_m, BLOCK_D=block_d, num_warps=4, num_stages=1,
        )  # fmt: skip
