"""Products of many rows in bfloat16 on a CPU that has no arithmetic of that type: weights are widened to float32 for the product,
which is rounded once. PyTorch's own takes several times as long there, and sums in float32 too.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .handler import Choice
from .spec import decoder_of
from .undo import Undo, has_own_forward, replace_forward

FEWEST = 64
"""Rows from which on widening weights takes less time than it saves."""
AT_ONCE = 1 << 22
"""Weights that are widened at a time."""


@cache
def lacks_bfloat16() -> bool:
    """Whether this processor must widen numbers of bfloat16 to compute with them, as x86 without AVX512_BF16 and AMX."""
    known = (getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return platform.machine() in ("x86_64", "AMD64") and not any(known)


def widen(undo: Undo, model: PreTrainedModel, choice: Choice) -> None:
    """Let the products of a decoder in bfloat16 be those that ``choice`` gives, until ``undo``, on a processor where its own are
    slow."""
    if model.dtype == torch.bfloat16 and lacks_bfloat16():
        for linear in decoder_of(model).modules():
            if type(linear) is not nn.Linear or not has_own_forward(linear):
                continue
            if type(linear.weight.data) is Tensor:  # no codes of another library
                replace_forward(undo, linear, partial(_forward, linear, choice))


def _forward(linear: nn.Linear, choice: Choice, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    operations = choice(x, linear.weight)
    return forward(x) if operations is None else operations.linear(x, linear.weight, linear.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, by widened weights where that pays."""
    alike = x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu"
    graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not alike or graph or x.numel() < FEWEST * x.shape[-1] or not lacks_bfloat16():
        return F.linear(x, weight, bias)
    wide, step = x.float(), max(1, AT_ONCE // weight.shape[1])
    out = x.new_empty(*x.shape[:-1], len(weight))
    for start in range(0, len(weight), step):
        some = slice(start, start + step)
        out[..., some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return out
