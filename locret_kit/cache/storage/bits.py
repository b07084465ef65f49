"""Bits of a stored number: which there are, and what goes with them."""

from __future__ import annotations

from ...policies.policy import Policy
from .packing import BITS

FLOAT8 = 8
"""Bits that are no codes of groups but floating point: see ``float8``."""


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
