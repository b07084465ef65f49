"""In-place compaction as a Triton kernel; ``__init__.py`` defines it.

Blocks of rows are read and written from the front. The index ascends, so a row is read before it is overwritten, and rows
that stay where they are cost nothing. Columns are independent, so a head's columns are spread over programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import common
from ..common import check
from . import check_moves

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size -> the type as which bits are copied, whatever they mean."""


@triton.jit
def _compact_rows(
    x, index, stride_b, stride_h, stride_s, H, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """A program owns one head's block of columns."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    x += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    index += tl.program_id(0).to(tl.int64) * K
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


@triton.jit
def _kept_rows(stay, index, S, K, BLOCK_S: tl.constexpr):
    """A program owns one head: it counts the rows that stay, a block of them (BS) at a time."""
    stay += tl.program_id(0).to(tl.int64) * S
    index += tl.program_id(0).to(tl.int64) * K
    before = 0  # rows that stay, in the blocks before
    for s in range(0, S, BLOCK_S):
        rows = s + tl.arange(0, BLOCK_S)  # [BS]
        stays = (tl.load(stay + rows, mask=rows < S, other=0) != 0).to(tl.int32)  # [BS]
        place = before + tl.cumsum(stays, 0) - 1  # [BS]
        tl.store(index + place, rows.to(tl.int64), mask=(stays != 0) & (place < K))
        before += tl.sum(stays, 0)


def kept_rows(stay_BHS: Tensor, keep: int) -> Tensor:
    """See the definition, ``kept_rows``."""
    stay = stay_BHS.contiguous().view(torch.uint8)
    check(stay=stay)
    B, H, S = stay.shape
    index = torch.empty(B, H, keep, dtype=torch.int64, device=stay.device)
    common.launch(
        _kept_rows,
        (B * H,),
        stay,
        index,
        S,
        keep,
        BLOCK_S=min(4096, triton.next_power_of_2(S)),
        num_warps=8,
        num_stages=1,
    )
    return index


def compact_rows(buffers: Sequence[Tensor], index_BHK: Tensor) -> None:
    """See the definition, ``compact_rows``."""
    index = index_BHK.contiguous()
    B, H, K = index.shape
    for buffer in buffers:
        check_moves(index, buffer)
        rows = buffer if buffer.dim() == 4 else buffer[..., None]
        bits = rows.view(INTEGERS[rows.element_size()])
        check(index=index, buffer=bits[0, 0])
        D = bits.shape[-1]
        block_d = min(16, triton.next_power_of_2(D))
        block_k = min(1024 if D > 1 else 2048, triton.next_power_of_2(K))
        common.launch(
            _compact_rows, (B * H, cdiv(D, block_d)), bits, index, *bits.stride()[:3], H, K, D,
            BLOCK_K=block_k, BLOCK_D=block_d, num_warps=16 if D > 1 else 8, num_stages=1,
        )  # fmt: skip
