"""Selection of rows and their compaction as Triton kernels; ``__init__.py`` defines them.

A score becomes an integer of the same order, and the smallest integer that stays is found from the top, two bits at a time.
Each digit is three counts over the head's rows, which lie in a card's nearest memory. The result is exact and the same in
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

from .. import check_keep, common
from ..common import check
from . import Addresses, check_scores


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
