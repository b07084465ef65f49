"""Attention whose rows are split over programs: how many splits there are, and merging their outputs by log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from . import common
from .common import HEAD_SIZES, LOG2E, load_rows

PROGRAMS = 512
"""Programs that a launch should have: a few per multiprocessor of the cards at hand (108 to 144 of them)."""
LEAST_BLOCKS = 4
"""Blocks of rows that a split has at least, so that its loop pays for its start."""


def split_rows(rows: int, block: int, programs: int) -> tuple[int, int]:
    """``(splits, rows per split)`` of ``rows``, where ``programs`` programs per split run anyway; splits end at whole blocks."""
    splits = max(1, min(cdiv(rows, LEAST_BLOCKS * block), cdiv(PROGRAMS, programs)))
    per_split = cdiv(cdiv(rows, splits), block) * block
    return cdiv(rows, per_split), per_split


@triton.jit
def _join(parts, norms, out, norm, N, splits, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr):
    """One output row ``[D]`` from its parts ``[splits, D]``. A program owns one of the ``N`` rows."""
    D: tl.constexpr = D0 + D1
    n = tl.program_id(0).to(tl.int64)
    parts += n * D
    # A softmax over the splits, a block at a time: `total` and `y` are scaled by 2**-top, the largest norm so far.
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    y0 = tl.zeros([D0], tl.float32)
    y1 = tl.zeros([D1 if D1 > 0 else 16], tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)  # [BLOCK]
        there = split < splits
        x = tl.load(norms + n + split.to(tl.int64) * N, mask=there, other=float("-inf")) * LOG2E  # [BLOCK]
        new = tl.maximum(top, tl.max(x, 0))  # [1]
        shift = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is NaN
        weight = tl.exp2(x - shift)  # [BLOCK]
        fade = tl.exp2(top - shift)  # [1]
        x0, x1 = load_rows(parts, split.to(tl.int64), there, N * D, D0, D1)  # [BLOCK, D0], [BLOCK, D1]
        total = total * fade + tl.sum(weight, 0)
        y0 = y0 * fade + tl.sum(weight[:, None] * x0, 0)  # [D0]
        if D1 > 0:
            y1 = y1 * fade + tl.sum(weight[:, None] * x1, 0)  # [D1]
        top = new
    tl.store(norm + n + tl.arange(0, 1), (top + tl.log2(total)) / LOG2E)  # -inf where no part has rows
    total = tl.where(total == 0.0, 1.0, total)
    to = out + n * D
    tl.store(to + tl.arange(0, D0), (y0 / total).to(out.dtype.element_ty))
    if D1 > 0:
        tl.store(to + D0 + tl.arange(0, D1), (y1 / total).to(out.dtype.element_ty))


def merge_splits(parts_PND: Tensor, norm_PN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output ``[..., D]`` and natural log-sum-exp ``[...]`` (float32) of ``P`` splits, summed in a fixed order. Where no split
    has rows the output is 0 and the log-sum-exp -inf.

    Args:
        parts_PND: each split's output ``[P, ..., D]``, 0 where it has no rows.
        norm_PN: each split's log-sum-exp ``[P, ...]``, -inf where it has no rows.
    """
    splits, N, D = len(parts_PND), norm_PN[0].numel(), parts_PND.shape[-1]
    if splits == 1:
        return parts_PND[0].to(dtype), norm_PN[0]
    D0, D1 = HEAD_SIZES[D]
    out = torch.empty(parts_PND.shape[1:], dtype=dtype, device=parts_PND.device)
    norm = torch.empty(norm_PN.shape[1:], dtype=torch.float32, device=parts_PND.device)
    common.launch(
        _join, (N,), parts_PND, norm_PN, out, norm, N, splits, D0=D0, D1=D1, BLOCK=32 if D < 128 else 16, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return out, norm
