"""Attention of a chunk and the statistics of its weights, in one call (``cpu.cpp``). It equals the definition but
for rounding.

Each weight is computed once, for the output and for the statistics. Rows are rotated as they are read. Keys and values
of bfloat16 are read as they are; weights and sums are of float32.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import cpp
from ..column_stats import MARGIN, ColumnStats, check_queries
from . import ChunkRotation

SOURCE = Path(__file__).with_name("cpu.cpp")
ATTENTION = cpp.Struct(SOURCE, "Attention")
LANES = 16
"""Channels of a head are a multiple of it: numbers of the widest vector."""
MAX_ROWS = 1 << 14
"""Above it the weights of a few queries are more than a core's caches hold, and PyTorch's attention is the better one."""


@cache
def load() -> cpp.Library:
    """The compiled call.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    return cpp.load(SOURCE, locret_attend=(cpp.ADDRESS, cpp.INT))


def takes(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> bool:
    """Whether ``attend_and_count`` takes these."""
    three, D = (q_BQTD, k_BHSD, v_BHSD), q_BQTD.shape[-1]
    if torch.is_grad_enabled() and any(x.requires_grad for x in three):
        return False
    alike = all(type(x) is Tensor and x.dtype == q_BQTD.dtype and x.shape[-1] == D and x.stride(-1) == 1 for x in three)
    fits = k_BHSD.shape == v_BHSD.shape and D % LANES == 0 and D <= cpp.MAX_CHANNELS and k_BHSD.shape[2] <= MAX_ROWS
    return alike and fits and q_BQTD.device.type == "cpu" and q_BQTD.dtype in cpp.DTYPES


def attend_and_count(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    scaling: float,
    *,
    want: frozenset[str] = frozenset(),
    by_head: bool = False,
    rotation: ChunkRotation | None = None,
) -> tuple[Tensor, list[ColumnStats]]:
    """Attention output ``[B, Q, T, D]`` and column statistics by compiled calls.

    With a ``rotation`` queries and keys come before RoPE.

    Args:
        want: some of ``STATISTICS`` of this package.
    """
    check_queries(q_BQTD, k_BHSD)
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    new = partial(torch.empty, dtype=torch.float32, device=q_BQTD.device)
    out_BTQD = new(B, T, Q, D)
    sets, kinds = (1 + by_head * (Q // H)) * bool(want), sorted(want)
    stats = new(sets, len(kinds), B, H, S)
    at = np.zeros((), ATTENTION.dtype)
    ATTENTION.point(at, q_BQTD.dtype, strided=True, q=q_BQTD, k=k_BHSD, v=v_BHSD)
    ATTENTION.point(at, out=out_BTQD, stats=stats)
    for name, x in (("q", q_BQTD), ("k", k_BHSD), ("v", v_BHSD)):
        at[f"{name}_text"], at[f"{name}_head"], at[f"{name}_row"] = x.stride()[:3]
    at["texts"], at["queries"], at["heads"], at["tokens"], at["rows"], at["channels"] = B, Q, H, T, S, D
    at["type"], at["scaling"], at["margin"] = cpp.TYPES[q_BQTD.dtype], scaling, MARGIN
    at["statistics"], at["by_head"] = sum(cpp.STATISTICS[name] for name in kinds), by_head
    if rotation is not None:
        cos, sin, q_cos, q_sin = tables = [x.float().contiguous() for x in rotation]
        ATTENTION.point(at, cos=cos, sin=sin, q_cos=q_cos, q_sin=q_sin)
        at["rotated"] = tables[-1].shape[-1]
    load().locret_attend(at.ctypes.data, torch.get_num_threads())
    counted = [ColumnStats(**dict(zip(kinds, one, strict=True))) for one in stats]
    return out_BTQD.to(q_BQTD.dtype).transpose(1, 2), counted
