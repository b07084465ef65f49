"""One decoded token of each of several texts in one call (``cpu.cpp``).

A decoded token reads every weight once and computes little, so its time is that of memory, unless hundreds of small operations
come between. Here a few threads stay in one function from the words to the logits, and read weights once for all texts.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .. import cpp
from ..product import cpu as product
from ..product.formats import format_of

LAYOUT = cpp.HEADERS / "layout.h"
FORMAT, LINEAR, PACKED, ROWS = (cpp.Struct(LAYOUT, name) for name in ("Format", "Linear", "Packed", "Rows"))
LAYER, DECODER = (cpp.Struct(LAYOUT, name, Linear=LINEAR) for name in ("Layer", "Decoder"))


@cache
def load(dtype: torch.dtype, channels: int) -> cpp.Library:
    """The compiled step for weights of a type and heads of so many channels.

    Raises:
        cpp.Unavailable: another type or system, no compiler, or one that fails.
    """
    if channels > cpp.MAX_CHANNELS:
        raise cpp.Unavailable(f"heads of {channels} channels, more than {cpp.MAX_CHANNELS}")
    if dtype not in cpp.TYPES:
        raise cpp.Unavailable(f"weights of {str(dtype).removeprefix('torch.')}")
    options = cpp.head_options(dtype, channels)
    p, n, i = cpp.ADDRESS, cpp.NUMBER, cpp.INT
    return cpp.load(
        Path(__file__).with_name("cpu.cpp"), *options, locret_step=(p, n, p, p, p, p, i), locret_holds=(p, p, n, p, i)
    )


@cache
def format_at(form: str) -> np.ndarray:
    """A format of few bits as the step finds it, with its compiled calls.

    Raises:
        cpp.Unavailable: as ``load``.
    """
    size, library = format_of(form), product.load(form)
    rows, unpack = (ctypes.cast(call, ctypes.c_void_p).value for call in (library.locret_rows, library.locret_unpack))
    return FORMAT.of(block=size.block, nbytes=size.nbytes, rows=rows, unpack=unpack)
