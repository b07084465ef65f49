"""Reading and quantising of rows in few bits, in one call for many layers (``cpu.cpp``)."""

from __future__ import annotations

import ctypes
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
def load() -> ctypes.CDLL:
    """The compiled calls.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    loaded = cpp.load(Path(__file__).with_name("cpu.cpp"), "-ffp-contract=off")  # it rounds as tensors do
    loaded.locret_quantise.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.locret_open.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    loaded.locret_quantise.restype = loaded.locret_open.restype = None
    return loaded
