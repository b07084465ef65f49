"""Normalisation with the residual, and the gated activation, each in one call (``cpu.cpp``), of float32 and bfloat16."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .. import cpp
from .. import fused as reference
from . import check_gate, check_norm


@cache
def load() -> cpp.Library:
    """The compiled calls.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    p, n, i = cpp.ADDRESS, cpp.NUMBER, cpp.INT
    norm, gate = (p, p, p, cpp.REAL, n, n, p, p, i, i), (p, p, n, n, n, n, p, i, i)
    return cpp.load(Path(__file__).with_name("cpu.cpp"), locret_rms_norm=norm, locret_swiglu=gate)


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normed sum and the sum of ``x`` and ``residual``, in their shape, by one compiled call."""
    check_norm(x, weight_C, residual)
    others = (weight_C,) if residual is None else (weight_C, residual)
    if x.dtype not in cpp.DTYPES or any(other.dtype != x.dtype for other in others):
        return reference.rms_norm(x, weight_C, eps, residual)
    x, weight_C, C = x.contiguous(), weight_C.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    total, before = (x, None) if residual is None else (torch.empty_like(x), residual.contiguous())
    load().locret_rms_norm(
        *(cpp.address(given, x.dtype) for given in (x, before, weight_C)), eps, x.numel() // C, C,
        *(cpp.address(made, x.dtype) for made in (total, out)), cpp.TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``up * silu(gate)`` of two tensors ``[..., C]`` of one shape, compiled; see the definition, ``swiglu``."""
    check_gate(gate, up)
    if gate.dtype not in cpp.DTYPES or up.dtype != gate.dtype:
        return reference.swiglu(gate, up)
    C = gate.shape[-1]
    gate_NC, up_NC = (x.reshape(-1, C) if x.stride(-1) == 1 else x.contiguous().view(-1, C) for x in (gate, up))
    out = gate.new_empty(gate.shape)
    load().locret_swiglu(
        *(cpp.address(given, gate.dtype, strided=True) for given in (gate_NC, up_NC)), len(gate_NC), C, gate_NC.stride(0),
        up_NC.stride(0), cpp.address(out, gate.dtype), cpp.TYPES[gate.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
