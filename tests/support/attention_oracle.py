"""Attention and rotation from their definitions, in float64."""

import torch
from torch import Tensor


def newest(T: int, S: int, window: int | None = None) -> Tensor:
    """Which of ``S`` rows the newest ``T`` tokens see ``[T, S]``: their own and those before it, within a window."""
    age = torch.arange(S - T, S)[:, None] - torch.arange(S)
    return (age >= 0) & (age < (window or S))


def logits(q: Tensor, k: Tensor, scaling: float, seen: Tensor | None = None) -> Tensor:
    """``[B, Q, T, S]``, minus infinity where a query does not see a row."""
    x = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scaling
    return x.masked_fill(~(newest(*x.shape[-2:]) if seen is None else seen), float("-inf"))


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, seen: Tensor | None = None) -> Tensor:
    """``[B, Q, T, D]``, zeros where a query sees nothing."""
    weights = logits(q, k, scaling, seen).softmax(-1).nan_to_num(0.0)
    return weights @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rows ``[..., D]`` whose channels (i, i + R / 2) are turned by ``angle [..., R / 2]``, as complex numbers."""
    half = angle.shape[-1]
    number = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    number = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((number.real, number.imag, x[..., 2 * half :]), -1)
