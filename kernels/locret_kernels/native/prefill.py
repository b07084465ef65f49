"""A chunk of a prompt on a CPU by compiled calls (``prefill.cpp``): the same as the references to the rounding of float32.

Attention computes each weight once, for the output and for what is summed over it, and rotates rows as it reads them. Keys
and values of bfloat16 are read as they are; weights and sums are of float32.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import check_queries
from ..column_stats.reference import MARGIN, ColumnStats
from ..fused.reference import check_gate, check_norm
from . import ATTENTION, MOST_CHANNELS, STATISTICS, TYPES, Unavailable, load_prefill, load_quantiser

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
"""Of rows and hidden states; float64 stays with the definitions."""
LANES = 16
"""Channels of a head are a multiple of it: numbers of the widest vector."""
MOST_ROWS = 1 << 14
"""Above it the weights of a few queries are more than a core's caches hold, and PyTorch's attention is the better one."""


class Turn(NamedTuple):
    """Tables by which keys ``[S, R]`` and queries ``[T, R]`` are rotated as they are read."""

    cos_SR: Tensor
    sin_SR: Tensor
    q_cos_TR: Tensor
    q_sin_TR: Tensor


@cache
def ready() -> bool:
    """Whether the calls run here; compiles them where they are not yet. Says why they do not, once."""
    try:
        load_prefill()
        load_quantiser()
    except Unavailable as error:
        logger.warning("prompts are read by PyTorch's operations alone, which is slower here: %s", error)
        return False
    return True


def attends(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> bool:
    """Whether ``attend`` takes these."""
    three, D = (q_BQTD, k_BHSD, v_BHSD), q_BQTD.shape[-1]
    if torch.is_grad_enabled() and any(x.requires_grad for x in three):
        return False
    alike = all(type(x) is Tensor and x.dtype == q_BQTD.dtype and x.shape[-1] == D and x.stride(-1) == 1 for x in three)
    fits = D % LANES == 0 and D <= MOST_CHANNELS and k_BHSD.shape[2] <= MOST_ROWS
    return alike and fits and q_BQTD.device.type == "cpu" and q_BQTD.dtype in DTYPES


def attend(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    scaling: float,
    *,
    want: frozenset[str] = frozenset(),
    by_head: bool = False,
    turn: Turn | None = None,
) -> tuple[Tensor, list[ColumnStats]]:
    """As ``column_stats.reference.attend_and_count``, of queries and keys before RoPE where there is a ``turn``.

    Args:
        want: some of ``STATISTICS`` of this package.
    """
    check_queries(q_BQTD, k_BHSD)
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    out_BTQD = torch.empty(B, T, Q, D)
    sets, kinds = (1 + by_head * (Q // H)) * bool(want), sorted(want)
    stats = torch.empty(sets, len(kinds), B, H, S)
    at = np.zeros((), ATTENTION)
    for name, x in (("q", q_BQTD), ("k", k_BHSD), ("v", v_BHSD)):
        at[name] = x.data_ptr()
        at[f"{name}_text"], at[f"{name}_head"], at[f"{name}_row"] = x.stride()[:3]
    at["out"], at["stats"] = out_BTQD.data_ptr(), stats.data_ptr()
    at["texts"], at["queries"], at["heads"], at["tokens"], at["rows"], at["channels"] = B, Q, H, T, S, D
    at["type"], at["scaling"], at["margin"] = TYPES[q_BQTD.dtype], scaling, MARGIN
    at["statistics"], at["by_head"] = sum(STATISTICS[name] for name in kinds), by_head
    held = () if turn is None else [x.float().contiguous() for x in turn]
    for name, x in zip(("cos", "sin", "q_cos", "q_sin"), held, strict=False):
        at[name], at["rotated"] = x.data_ptr(), x.shape[-1]
    load_prefill().locret_attend(at.ctypes.data, torch.get_num_threads())
    counted = [ColumnStats(**dict(zip(kinds, one, strict=True))) for one in stats]
    return out_BTQD.to(q_BQTD.dtype).transpose(1, 2), counted


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As ``fused.reference.rms_norm``."""
    check_norm(x, weight_C, residual)
    x, weight_C, C = x.contiguous(), weight_C.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    total, before = (x, None) if residual is None else (torch.empty_like(x), residual.contiguous())
    load_prefill().locret_rms_norm(
        x.data_ptr(), None if before is None else before.data_ptr(), weight_C.data_ptr(), eps, x.numel() // C, C,
        total.data_ptr(), out.data_ptr(), TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As ``fused.reference.swiglu``."""
    check_gate(gate, up)
    C = gate.shape[-1]
    gate_NC, up_NC = (x.reshape(-1, C) if x.stride(-1) == 1 else x.contiguous().view(-1, C) for x in (gate, up))
    out = gate.new_empty(gate.shape)
    load_prefill().locret_swiglu(
        gate_NC.data_ptr(), up_NC.data_ptr(), len(gate_NC), C, gate_NC.stride(0), up_NC.stride(0), out.data_ptr(),
        TYPES[gate.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
