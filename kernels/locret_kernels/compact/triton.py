"""In-place compaction as a Triton kernel; ``__init__.py`` defines it.

Blocks of rows are read and written from the front. The index ascends, so a row is read before it is overwritten, and rows
that stay where they are cost nothing. Columns are independent, so a head's columns are spread over programs. Buffers of one kind
are one launch, wherever they lie: the kernel reads from a table where each begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from .. import check_keep, common
from ..common import check
from . import Addresses

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
