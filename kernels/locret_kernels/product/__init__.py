"""Products with matrices of few bits, which stay as they lie in a GGUF file. By definition the matrix is unpacked to float32,
then multiplied.

Letters: T tokens, N rows of the matrix, K its columns, B blocks of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["product"]

# Formats are those of a GGUF file: a row of numbers is a row of blocks. A block holds an integer code of each of its numbers, and
# steps and lowest numbers of groups of them. Source: ``ggml-common.h`` and ``ggml-quants.c`` of ggml.


@dataclass(frozen=True)
class Format:
    """Sizes of a format.

    Attributes:
        block: numbers of a block. nbytes: bytes of a block.
    """

    block: int
    nbytes: int

    def columns(self, row_bytes: int) -> int:
        """Numbers in a row of ``row_bytes`` bytes."""
        return row_bytes // self.nbytes * self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` numbers.

        Raises:
            ValueError: they do not fill whole blocks.
        """
        if columns % self.block:
            raise ValueError(f"columns={columns} must be a multiple of {self.block}, a block")
        return columns // self.block * self.nbytes


FORMATS = {
    "Q4_0": Format(32, 18),
    "Q4_1": Format(32, 20),
    "Q5_0": Format(32, 22),
    "Q5_1": Format(32, 24),
    "Q8_0": Format(32, 34),
    "Q4_K": Format(256, 144),
    "Q5_K": Format(256, 176),
    "Q6_K": Format(256, 210),
}
"""Name, as ``GGMLQuantizationType`` has it -> sizes."""


def product(x: Tensor, data: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]`` times a packed matrix ``[N, row_bytes]``, transposed, plus a bias ``[N]`` where there is one: ``[..., N]``.

    The result is of the type of ``x``; sums are of float32, of float64 where that is the type.

    Args:
        form: one of ``FORMATS``. bias: of the type of ``x``.

    Raises:
        ValueError: an unknown format, or shapes that do not fit each other.
    """
    check_packed(x, data, form)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), unpack(data, form).to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def unpack(data: Tensor, form: str) -> Tensor:
    """Numbers ``[N, K]`` (float32) of a packed matrix ``[N, row_bytes]``.

    Raises:
        ValueError: an unknown format, data of another type than uint8, or rows that are no whole blocks.
    """
    check_packed(None, data, form)
    blocks_NBb = data.unflatten(-1, (-1, FORMATS[form].nbytes))
    return READERS[form](blocks_NBb).flatten(1)


def check_packed(x: Tensor | None, data_Nb: Tensor, form: str) -> None:
    """Raise ValueError unless the bytes ``[N, bytes]`` are rows of whole blocks of a format, as long as the rows of
    ``x``."""
    sizes = FORMATS[form]
    if data_Nb.dtype != torch.uint8 or data_Nb.dim() != 2 or data_Nb.shape[1] % sizes.nbytes:
        kind = f"{tuple(data_Nb.shape)} of {str(data_Nb.dtype).removeprefix('torch.')}"
        raise ValueError(f"data {kind} must be rows of uint8 in blocks of {sizes.nbytes} bytes (form={form!r})")
    if x is not None and x.shape[-1] != (columns := sizes.columns(data_Nb.shape[1])):
        raise ValueError(f"x {tuple(x.shape)} must have rows of {columns} numbers, as those of data (form={form!r})")


def _half(block: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, as float32 ``[N, B, 1]``."""
    return block[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """The low halves of bytes ``[N, B, n]``, then their high halves: codes ``[N, B, 2 * n]``."""
    return torch.cat([codes & 15, codes >> 4], -1)


def _bits(block: Tensor, at: int) -> Tensor:
    """The 32 bits of four bytes, the lowest first: ``[N, B, 32]``."""
    return (block[..., at : at + 4, None] >> _shifts(block, 8) & 1).flatten(-2)


def _shifts(block: Tensor, count: int) -> Tensor:
    """Shifts ``[C]`` (uint8) from 0 to ``C - 1``, for ``count`` C."""
    return torch.arange(count, dtype=torch.uint8, device=block.device)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Steps and lowest numbers ``[N, B, 8]`` of a block's eight groups, six bits each, from twelve bytes.

    The first eight bytes hold four of each, and above them the two highest bits of the other four. The rest holds the
    other four's low bits.
    """
    step, low, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    steps = torch.cat([step & 63, rest & 15 | step >> 6 << 4], -1)
    lows = torch.cat([low & 63, rest >> 4 | low >> 6 << 4], -1)
    return steps, lows


def _grouped(block: Tensor, codes: Tensor) -> Tensor:
    """Numbers of a block of eight groups, from codes ``[N, B, 8, 32]``."""
    steps, lows = _six_bits(block[..., 4:16])
    step, low = _half(block, 0) * steps, _half(block, 2) * lows  # [N, B, 8]
    return step[..., None] * codes - low[..., None]


def _low(codes: Tensor) -> Tensor:
    """Low four bits ``[N, B, 8, 32]`` of the codes of a block of eight groups, from bytes ``[N, B, 128]``."""
    return _nibbles(codes.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)


def _q6_k(block: Tensor) -> Tensor:
    """Numbers ``[N, B, 16, 16]`` (float32) of blocks of the format Q6_K."""
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64)))  # [N, B, 2, 128]: halves of a block
    high = block[..., 128:192].unflatten(-1, (2, 1, 32)) >> _shifts(block, 4)[:, None] * 2 & 3
    codes = (low | high.flatten(-2) << 4).flatten(-2)  # [N, B, 256]
    step = _half(block, 208) * block[..., 192:208].contiguous().view(torch.int8)  # [N, B, 16]
    return step[..., None] * (codes.float() - 32).unflatten(-1, (16, 16))


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": lambda block: _half(block, 0) * (_nibbles(block[..., 2:]).float() - 8),
    "Q4_1": lambda block: _half(block, 0) * _nibbles(block[..., 4:]) + _half(block, 2),
    "Q5_0": lambda block: _half(block, 0) * ((_nibbles(block[..., 6:]) | _bits(block, 2) << 4).float() - 16),
    "Q5_1": lambda block: _half(block, 0) * (_nibbles(block[..., 8:]) | _bits(block, 4) << 4) + _half(block, 2),
    "Q8_0": lambda block: _half(block, 0) * block[..., 2:].contiguous().view(torch.int8),
    "Q4_K": lambda block: _grouped(block, _low(block[..., 16:])),
    "Q5_K": lambda block: _grouped(block, _low(block[..., 48:]) | (block[..., 16:48, None] >> _shifts(block, 8) & 1).mT << 4),
    "Q6_K": _q6_k,
}  # fmt: skip
"""Format -> numbers ``[N, B, block]`` or ``[N, B, groups, group]`` (float32) of its blocks ``[N, B, nbytes]``."""
