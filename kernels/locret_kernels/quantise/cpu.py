"""Reading and quantising of rows in few bits, in one call for many layers (``cpu.cpp``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from .. import cpp

GROUP = np.dtype(
    [(name, np.int64) for name in (
        "key_codes", "value_codes", "group", "key_step", "key_zero", "value_step", "value_zero", "tail_keys", "tail_values",
        "hadamard", "heads", "rows", "capacity", "channels", "bits", "groups", "value_group", "tail", "ready", "full", "pairs",
        "type", "keys", "values", "tail_room", "room",
    )]
)  # fmt: skip


@cache
def load() -> cpp.Library:
    """The compiled calls.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    calls = {"locret_quantise": (cpp.ADDRESS, cpp.NUMBER, cpp.INT), "locret_open": (cpp.ADDRESS, cpp.INT, cpp.INT)}
    return cpp.load(Path(__file__).with_name("cpu.cpp"), "-ffp-contract=off", **calls)  # it rounds as tensors do
