"""Selection of rows as one Triton kernel; ``__init__.py`` defines it.

A score becomes an integer of the same order, and the smallest integer that stays is found bit by bit from the top: a radix
select with digits of one bit, each a count over the head's rows. Rows that a program can hold stay in its registers. What
follows is exact and the same in every run: nothing is added in floating point, and there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import common
from ..common import check
from . import check_scores

HELD = 32768
"""Rows that a program holds in registers: 32 for each of its threads. Of longer heads it reads them anew for every bit."""


@triton.jit
def _ordered(scores, protected, valid, rows, S, largest):
    """Keys ``[rows]`` (uint32) in the order of the reference's: 0 past the end, then padding, scores, protected rows, NaN."""
    there = rows < S
    x = tl.load(scores + rows, mask=there, other=0.0).to(tl.float32)  # [BS]
    guarded = tl.load(protected + rows, mask=there, other=0) != 0
    padding = tl.load(valid + rows, mask=there, other=0) == 0
    unknown = (x != x) & ~guarded & ~padding
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    x = tl.where(padding, float("-inf"), tl.where(guarded, float("inf"), x))
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -(2**31))  # negative numbers are in reverse, and below the others
    key = tl.where(x == 0.0, -(2**31), key)  # 0 and -0 are equal
    key = tl.where(unknown, -1, key)
    return tl.where(there, key, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _select_rows(
    scores, protected, valid, most, stay, largest, S, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A program owns one head, and reads BS rows at a time; with ``WHOLE`` that is all of them. It writes BE at a time."""
    head = tl.program_id(0).to(tl.int64)
    scores += head * S
    protected += head * S
    valid += head * S
    stay += head * S
    wanted = tl.load(most + head).to(tl.int32)
    block = tl.arange(0, BLOCK_S)  # [BS]
    key = _ordered(scores, protected, valid, block, S, largest)  # [BS]
    # `least` grows to the largest key that `wanted` rows reach, from its highest bit on.
    least = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 2**31, tl.uint32)
    for _ in range(32):
        higher = least | bit  # [1]
        reach = tl.zeros([1], tl.int32)
        for s in range(0, S, BLOCK_S):
            if not WHOLE:
                key = _ordered(scores, protected, valid, s + block, S, largest)
            reach += tl.sum((key >= higher).to(tl.int32), 0)
        least = tl.where(reach >= wanted, higher, least)
        bit = bit >> 1
    above = tl.zeros([1], tl.int32)
    equal = tl.zeros([1], tl.int32)
    for s in range(0, S, BLOCK_S):
        if not WHOLE:
            key = _ordered(scores, protected, valid, s + block, S, largest)
        above += tl.sum((key > least).to(tl.int32), 0)
        equal += tl.sum((key == least).to(tl.int32), 0)
    # Of the rows with that key the newest stay: those with fewer after them than there is room for.
    for s in range(0, S, BLOCK_E):
        rows = s + tl.arange(0, BLOCK_E)  # [BE]
        mine = _ordered(scores, protected, valid, rows, S, largest)  # [BE]
        same = (mine == least).to(tl.int32)  # [BE]
        after = equal - tl.cumsum(same, 0)  # [BE]
        stays = (mine > least) | ((same != 0) & (after < wanted - above))
        tl.store(stay + rows, stays.to(tl.uint8), mask=rows < S)
        equal -= tl.sum(same, 0)


def select_rows(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, most_BH: Tensor) -> Tensor:
    """See the definition, ``select_rows``."""
    check_scores(scores_BHS, protected_BHS, valid_BHS, most_BH)
    scores, most = scores_BHS.contiguous(), most_BH.contiguous()
    protected, valid = (x.contiguous().view(torch.uint8) for x in (protected_BHS, valid_BHS))
    check(scores=scores, protected=protected, valid=valid, most=most)
    B, H, S = scores.shape
    stay = torch.empty(B, H, S, dtype=torch.uint8, device=scores.device)
    block = min(HELD, triton.next_power_of_2(S))
    common.launch(
        _select_rows, (B * H,), scores, protected, valid, most, stay, torch.finfo(scores.dtype).max, S,
        BLOCK_S=block, BLOCK_E=min(8192, block), WHOLE=block >= S, num_warps=min(32, max(4, block // 1024)), num_stages=1,
    )  # fmt: skip
    return stay.view(torch.bool)
