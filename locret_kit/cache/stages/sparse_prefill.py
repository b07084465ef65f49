"""Sparse prefill: attention of a chunk over the rows that the policy chooses, and how much of it that is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_kernels.sparse_attend import Blocks

from ...policies.base import Sparse
from ..context import Context, Stage
from ..storage.rows import BoundedLayer


@dataclass(frozen=True)
class SparseStage(Stage):
    """Narrows the attention of a chunk to the blocks of rows that the policy chooses, and counts how much of it is computed."""

    sparse: Sparse

    def narrows(self, rows: BoundedLayer, tokens: int) -> bool:
        return tokens > 1 and rows.window is None

    def blocks(
        self, ctx: Context, layer: int, heads: slice, q_BQTD: Tensor, k_BHSD: Tensor, scaling: float
    ) -> Blocks | None:
        began, G = time.perf_counter(), q_BQTD.shape[1] // k_BHSD.shape[1]
        blocks = self.sparse.choose(layer, slice(heads.start * G, heads.stop * G), q_BQTD, k_BHSD, scaling)
        computed, dense = pairs_of(blocks, q_BQTD.shape[2], k_BHSD.shape[2])
        ctx.counters.computed_pairs += computed
        ctx.counters.dense_pairs += dense
        ctx.counters.select_s += time.perf_counter() - began
        return None if computed == dense else blocks  # a short context, of which a pattern leaves nothing out


def pairs_of(blocks: Blocks, tokens: int, rows: int) -> tuple[int, int]:
    """Pairs of a query and a row that the blocks compute, and those of dense attention in blocks of as many queries: for each
    query the rows up to the last of its block. The host waits for the device."""
    B, Q, N, U = blocks.seen_BQNU.shape
    device = blocks.seen_BQNU.device
    start_N = blocks.queries * torch.arange(N, device=device)
    queries_N = (tokens - start_N).clamp(max=blocks.queries)
    until_N1 = (rows - tokens + start_N + queries_N)[:, None]
    there_NU = (until_N1 - blocks.unit * torch.arange(U, device=device)).clamp(0, blocks.unit)
    pairs_NU = queries_N[:, None] * there_NU
    return int((blocks.seen_BQNU.sum((0, 1)) * pairs_NU).sum()), B * Q * int(pairs_NU.sum())
