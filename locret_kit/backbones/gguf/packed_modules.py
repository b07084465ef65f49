"""Layers whose matrices stay in few bits, as they lie in a GGUF file. Letters: N rows of the matrix, K its columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locret_kernels.product import FORMATS, product
from locret_kernels.product.reference import unpack

AT_ONCE = 1 << 22
"""Numbers of a matrix that are unpacked at a time."""
UNPACKED = 12
"""Bytes that come and go for each of them: codes, steps times codes, and their sum with what is lowest."""


class PackedLinear(nn.Module):
    """``nn.Linear`` with a packed matrix.

    Args:
        weight: ``[N, row_bytes]`` (uint8). form: one of ``FORMATS``. bias: ``[N]``.
    """

    def __init__(self, weight: Tensor, form: str, bias: Tensor | None = None) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def in_features(self) -> int:
        return FORMATS[self.form].columns(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        step = max(1, AT_ONCE // self.in_features)
        parts = [product(x, rows, self.form) for rows in self.weight.split(step)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, form={self.form}"


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` with a packed table: the rows of the tokens that are looked up are unpacked.

    Args:
        weight: ``[N, row_bytes]`` (uint8). form: one of ``FORMATS``. dtype: of the answers. scale: their factor, rounded to
            that type (Gemma).
    """

    def __init__(self, weight: Tensor, form: str, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.form, self.dtype, self.scale = form, dtype, scale
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = unpack(self.weight[ids.flatten()], self.form).to(self.dtype).view(*ids.shape, -1)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=self.dtype, device=rows.device)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, form={self.form}"
