"""FlashAttention-4 for PyTorch's operator, whatever its release: PyTorch 2.13 takes two values of a forward, output and
log-sum-exp, and releases after 4.0.0b18 return more.

``attend`` registers this module in the place of the package's own. It can be imported where the package is installed.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_package: Any = import_module("flash_attn.cute.interface")


def _flash_attn_fwd(q: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(q):  # it launches on the stream of PyTorch's current device
        out, lse, *_ = _package._flash_attn_fwd(q, *given, **named)
    return out, lse


def _flash_attn_bwd(q: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q):
        dq, dk, dv, *_ = _package._flash_attn_bwd(q, *given, **named)
    return dq, dk, dv
