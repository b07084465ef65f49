"""A layer's elementwise work between its products, each in one pass: normalisation with the residual, the gated activation, and
rotary position embedding by tables of cos and sin. The definitions, in torch, rounded where transformers rounds.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["rms_norm", "rotate_rows", "swiglu"]


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x + residual`` normalised over its last axis and scaled, and that sum, both in the type of ``x [..., C]``.

    The sum is rounded before it is normalised in float32, and the normalised rows before they are scaled. Source: Zhang &
    Sennrich 2019, as Llama's layers compute it.

    Raises:
        ValueError: a weight or a residual of another shape.
    """
    check_norm(x, weight_C, residual)
    total = x if residual is None else residual + x
    exact = total.to(torch.promote_types(x.dtype, torch.float32))
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight_C * normed.to(x.dtype), total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``up * silu(gate)`` of two tensors ``[..., C]`` of one shape and dtype. The activation is rounded before it is
    multiplied.

    Raises:
        ValueError: tensors of different shapes.
    """
    check_gate(gate, up)
    return up * F.silu(gate)


def rotate_rows(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate ``x [..., T, D]`` by the half-split convention; dimensions past ``R`` pass unchanged (partial rotary). Kernels take
    both halves of a table to be alike. Tables may have the other axes of ``x`` too."""
    r = cos_TR.shape[-1]
    part = x[..., :r]
    half = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), dim=-1)
    turned = part * cos_TR + half * sin_TR
    return turned if r == x.shape[-1] else torch.cat((turned, x[..., r:]), dim=-1)


def check_norm(x: Tensor, weight_C: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError unless the shapes of a normalisation fit each other."""
    if weight_C.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        other = "" if residual is None else f" and residual {tuple(residual.shape)}"
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight_C.shape)}{other} do not belong together")


def check_gate(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless both tensors have one shape."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be of one shape")
