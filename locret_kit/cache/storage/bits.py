"""Bits of a stored number: which there are, and what goes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...policies.policy import Policy

# ---- uniform quantisation to 4 or 2 bits with a step and a zero point a group, and codes packed into bytes ----------

# ``x`` is stored as ``code = round((x - zero) / step)`` and read back as ``zero + code * step``. Steps and zero points are
# float16; zero points are rounded down and steps where it matters up, so that every number comes back within half a
# step. Numbers beyond float16's range (65,504) saturate.
# Source: KIVI, arXiv 2402.02750, section 3; the rounding is ours.


BITS = (4, 2)
HALF_MAX = torch.finfo(torch.float16).max
VALUE_GROUP = 32
"""Channels of a rotated row that share a step and a zero point, at most."""
ROUNDING = 2.0**-10
"""Twice the largest relative error of rounding a normal number to float16."""
SUBNORMAL = 2.0**-24
"""The spacing of float16 near zero."""


def value_group(size: int) -> int:
    """Channels of a rotated row of ``size`` channels that share a step and a zero point."""
    return max(n for n in range(1, VALUE_GROUP + 1) if size % n == 0)


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
    """Numbers (float32) of codes."""
    return zero.float() + codes * step.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes ``[..., D * bits / 8]`` of codes ``[..., D]`` (uint8, below ``2^bits``); the first code has the lowest bits."""
    per_byte = 8 // bits
    # [..., D] -> [..., D / per_byte, per_byte], each code at its shift, summed to one byte
    return (codes.unflatten(-1, (-1, per_byte)) << _shifts(codes, bits)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes ``[..., D]`` (uint8) of bytes ``[..., D * bits / 8]``."""
    return ((packed[..., None] >> _shifts(packed, bits)) & (2**bits - 1)).flatten(-2)


def _shifts(like: Tensor, bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


# ---- bits of a stored number ----


FLOAT8 = 8
"""Bits that are no codes of groups but floating point: see ``codec.Float8``."""


def check_bits(kv_bits: int | None) -> None:
    """Raise ValueError unless ``kv_bits`` is 8, 4, 2 or None."""
    if kv_bits is not None and kv_bits not in (FLOAT8, *BITS):
        raise ValueError(
            f"kv_bits={kv_bits} must be 8, 4 or 2; without it, keys and values are kept in the model's dtype"
        )


def check_storage(kv_bits: int | None, policy: Policy) -> None:
    """Raise ValueError unless slots that ``policy`` keeps can be stored in ``kv_bits`` bits: a slot that was quantised is not
    written again."""
    check_bits(kv_bits)
    if kv_bits is not None and policy.merge is not None:
        raise ValueError(
            f"kv_bits={kv_bits} stores a slot once; policy={policy.name!r} merges evicted slots into it: leave one out"
        )
    if kv_bits is not None and policy.ragged:
        raise ValueError(
            f"kv_bits={kv_bits} is for heads of one length; those of policy={policy.name!r} differ: take one whose heads are "
            "equal, such as locret, snapkv or h2o"
        )


def check_head_size(bits: int, size: int) -> None:
    """Raise ValueError where the codes of a head's numbers do not fill whole bytes."""
    if size * bits % 8:
        raise ValueError(f"kv_bits={bits} needs a head size that is a multiple of {8 // bits}, not {size}")
