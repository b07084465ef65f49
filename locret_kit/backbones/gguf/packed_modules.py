"""Layers whose matrices stay in few bits, as they lie in a GGUF file. Letters: N rows of the matrix, K its columns."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor, nn

from locret_kernels import cpp
from locret_kernels.product import FORMATS, product
from locret_kernels.product import cpu as product_on_cpu
from locret_kernels.product.reference import unpack

logger = logging.getLogger(__name__)

AT_ONCE = 1 << 22
"""Numbers of a matrix that are unpacked at a time."""
UNPACKED = 12
"""Bytes that come and go for each of them: codes, steps times codes, and their sum with what is lowest."""


@cache
def multiplies_integers(form: str) -> bool:
    """Whether the C++ for products of a format runs here; compiles it where it is not yet. Says why it does not, once."""
    try:
        product_on_cpu.load(form)
    except cpp.Unavailable as error:
        logger.warning("matrices of %s are unpacked at every product, which is slower: %s", form, error)
        return False
    return True


def packed_product(x: Tensor, weight: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]`` times a packed matrix ``[N, row_bytes]``, transposed, plus a bias: integer products on a CPU; elsewhere by
    numbers that are unpacked for it, ``AT_ONCE`` at a time."""
    if x.device.type == "cpu" and x.dtype in cpp.DTYPES and multiplies_integers(form):
        return product_on_cpu.product(x, weight, form, bias)
    rows = max(1, AT_ONCE // FORMATS[form].columns(weight.shape[1]))
    parts = [product(x, some, form) for some in weight.split(rows)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return out if bias is None else out + bias


def unpacked_rows(rows: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Numbers ``[N, K]`` of packed rows, rounded to a type."""
    return unpack(rows, form).to(dtype)


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
        return packed_product(x, self.weight, self.form, self.bias)

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
        rows = unpacked_rows(self.weight[ids.flatten()], self.form, self.dtype).view(*ids.shape, -1)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=self.dtype, device=rows.device)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, form={self.form}"
