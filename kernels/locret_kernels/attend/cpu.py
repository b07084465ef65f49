"""Attention of a chunk and the statistics of its weights, in one call (``cpu.cpp``). It equals the definition but
for rounding.

Each weight is computed once, for the output and for the statistics. Rows are rotated as they are read. Keys and values
of bfloat16 are read as they are; weights and sums are of float32.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .. import cpp
from . import MARGIN, ChunkRotation, ColumnStats, check_queries

SOURCE = Path(__file__).with_name("cpu.cpp")
ATTENTION = cpp.Struct(SOURCE, "Attention")
LANES = 16
"""Channels of a head are a multiple of it: numbers of the widest vector."""
MAX_ROWS = 1 << 14
"""Above it the weights of a few queries are more than a core's caches hold, and PyTorch's attention is the better one."""


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

    Args:
        rotation: of queries and keys that come before RoPE.
    """
    check_queries(q_BQTD, k_BHSD)
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    new = partial(torch.empty, dtype=torch.float32, device=q_BQTD.device)
    out_BTQD = new(B, T, Q, D)
    sets, kinds = (1 + by_head * (Q // H)) * bool(want), sorted(want)
    stats = new(sets, len(kinds), B, H, S)
    given, axes = {"q": q_BQTD, "k": k_BHSD, "v": v_BHSD}, ("text", "head", "row")
    strides = {f"{name}_{axis}": x.stride(i) for name, x in given.items() for i, axis in enumerate(axes)}
    tables = dict.fromkeys(("cos", "sin", "q_cos", "q_sin"))
    if rotation is not None:
        tables = {name[:-3]: x.float().contiguous() for name, x in rotation._asdict().items()}
    at = ATTENTION.of(
        q_BQTD.dtype, strided=True, **given, **strides, out=out_BTQD, stats=stats, texts=B, queries=Q, heads=H, tokens=T, rows=S,
        channels=D, type=cpp.TYPES[q_BQTD.dtype], scaling=scaling, margin=MARGIN, by_head=by_head,
        statistics=sum(cpp.STATISTICS[name] for name in kinds), **tables,
        rotated=0 if rotation is None else rotation.cos_SR.shape[-1],
    )  # fmt: skip
    cpp.load(SOURCE).locret_attend(at.ctypes.data, torch.get_num_threads())
    counted = [ColumnStats(**dict(zip(kinds, one, strict=True))) for one in stats]
    return out_BTQD.to(q_BQTD.dtype).transpose(1, 2), counted
