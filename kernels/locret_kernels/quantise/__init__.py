"""Numbers in 8, 4 or 2 bits: ``code = round((x - zero) / step)``, read back as ``zero + code * step``, with a step and a zero
point of a group of numbers.

Steps and zero points are float16; zero points are rounded down and steps where it matters up, so that every number comes back
within half a step. Numbers beyond float16's range (65,504) saturate. Source: KIVI, arXiv 2402.02750, section 3; the rounding is
ours.

``cpu.cpp`` reads and quantises the rows of many layers in one call on a CPU. Their definition with tensors is the cache's own
(``locret_kit/cache/storage``).
"""

from pathlib import Path

import torch
from torch import Tensor

from .. import cpp

SOURCE = Path(__file__).with_name("cpu.cpp")
OPTIONS = ("-ffp-contract=off",)
"""It rounds as tensors do."""
GROUP = cpp.Struct(SOURCE, "Group")


def load() -> cpp.Library:
    """The compiled calls.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    return cpp.load(SOURCE, *OPTIONS)


def runs() -> bool:
    """Whether ``load`` gives the calls here, see ``cpp.runs``."""
    return cpp.runs(SOURCE, *OPTIONS)


HALF_MAX = torch.finfo(torch.float16).max
ROUNDING = 2.0**-10
"""Twice the largest relative error of rounding a normal number to float16."""
SUBNORMAL = 2.0**-24
"""The spacing of float16 near zero."""
CHANNELS = 32
"""Channels of a row that share a step and a zero point, at most."""


def shared_channels(size: int) -> int:
    """Channels of a row of ``size`` that share a step and a zero point: the most that divide it."""
    return max(n for n in range(1, CHANNELS + 1) if size % n == 0)


def levels(lo: Tensor, hi: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Step and zero point (float16, the shape of ``lo``) of groups whose smallest and largest number (float32) are given. Those
    of limits that were read back from codes are the same again, so that quantising anew does not drift."""
    most = 2**bits - 1
    # Rounded down, never up: a zero point above the smallest number would clip it.
    zero = lo.clamp(-HALF_MAX, HALF_MAX).half()
    below = (lo - lo.abs() * ROUNDING - SUBNORMAL).clamp(-HALF_MAX, HALF_MAX).half()
    zero = torch.where(zero.float() > lo, below, zero)
    # From the stored zero point, not from lo; a step that float16 rounded too small is made one unit larger.
    reach = hi - zero.float()
    step = (reach / most).clamp(SUBNORMAL, HALF_MAX).half()
    above = (reach / most * (1 + ROUNDING) + SUBNORMAL).clamp(max=HALF_MAX).half()
    return torch.where(reach > (most + 0.5) * step.float(), above, step), zero


def encode(x: Tensor, step: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes (uint8, the shape of ``x``) of float32 numbers; ``step`` and ``zero`` broadcast."""
    return ((x - zero.float()) / step.float()).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def decode(codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """Numbers (float32) of codes, of their shape; ``step`` and ``zero`` broadcast."""
    return zero.float() + codes * step.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes of shape ``[..., D * bits / 8]`` from codes ``[..., D]`` (uint8, below ``2^bits``). The first code has
    the lowest bits."""
    per_byte = 8 // bits
    # [..., D] -> [..., D / per_byte, per_byte], each code at its shift, summed to one byte
    return (codes.unflatten(-1, (-1, per_byte)) << _shifts(codes, bits)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes of shape ``[..., D]`` (uint8) from bytes ``[..., D * bits / 8]``."""
    return ((packed[..., None] >> _shifts(packed, bits)) & (2**bits - 1)).flatten(-2)


def _shifts(like: Tensor, bits: int) -> Tensor:
    """Shifts ``[C]`` (uint8) of the C codes in a byte, on the device of ``like``."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


def row_codes(x: Tensor, shared: int, bits: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8, the shape of ``x [..., D]``) of rows by themselves; step and zero point ``[..., D / shared]`` of their groups
    of ``shared`` channels."""
    x = x.float().unflatten(-1, (-1, shared))
    step, zero = levels(x.amin(-1), x.amax(-1), bits)
    return encode(x, step[..., None], zero[..., None], bits).flatten(-2), step, zero


def row_numbers(codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """Numbers ``[..., D]`` (float32) of what ``row_codes`` gives."""
    return decode(codes.unflatten(-1, (step.shape[-1], -1)), step[..., None], zero[..., None]).flatten(-2)
