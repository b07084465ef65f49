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

_I = np.int64  # numbers and addresses


def _linear(name: str) -> list[tuple[str, type]]:
    return [(name, _I), *((f"{name}_{field}", _I) for field in ("bias", "rows", "halved", "format"))]


FORMAT = np.dtype([(name, _I) for name in ("block", "nbytes", "rows", "unpack")])
LAYER = np.dtype(
    [(name, _I) for name in ("norm", "query_norm", "key_norm", "mlp_norm")]
    + [field for name in ("query", "key", "value", "out", "gate", "up", "down", "fc1", "fc2") for field in _linear(name)]
    + [(name, np.float64) for name in ("norm_eps", "head_eps", "mlp_eps", "scaling")]
)  # fmt: skip
DECODER = np.dtype(
    [(name, _I) for name in ("layers", "width", "query_heads", "heads", "channels", "vocabulary")]
    + [*_linear("words"), ("norm", _I), ("eps", np.float64), *_linear("head"), ("layer", _I)]
)
PACKED = np.dtype(
    [(name, _I) for name in (
        "key_codes", "value_codes", "group", "key_step", "key_zero", "value_step", "value_zero", "tail_keys", "tail_values",
        "bits", "group_bytes", "groups", "sharing", "value_groups", "tail_room", "tail",
    )]
)  # fmt: skip
ROWS = np.dtype(
    [(name, _I) for name in (
        "keys", "values", "positions", "scores", "stats", "starts", "lengths", "cos", "sin", "own_cos", "own_sin",
        "position", "rotated", "before", "window", "stats_stride", "statistics", "by_head", "packed",
    )]
)  # fmt: skip


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
    calls = (ctypes.cast(call, ctypes.c_void_p).value for call in (library.locret_rows, library.locret_unpack))
    return np.array([(size.block, size.nbytes, *calls)], FORMAT)
