"""One decoded token of each of several texts through a whole decoder, in one call on a CPU (``cpu.cpp``). The decoder's own
forward is its definition. On a GPU a layer is a few launches; ``row_products`` computes its matrix products.

A decoded token reads every weight once and computes little, so its time is that of memory, unless hundreds of small operations
come between. Here a few threads stay in one function from the words to the logits, and read weights once for all texts.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import cpp
from ..fused import rms_norm, swiglu
from ..product import FORMATS
from ..product import cpu as product

__all__ = ["row_products"]


class RowProducts(NamedTuple):
    """Weights of one launch: matrices, the norm before them, and whether a gate follows."""

    weights: tuple[Tensor, ...]
    """Up to four matrices ``[N, K]``."""
    biases: tuple[Tensor | None, ...]
    """One each, or none at all."""
    norm: Tensor | None = None
    """Weight ``[K]`` of the norm."""
    eps: float = 0.0
    gated: bool = False
    """Whether the result is ``swiglu`` of the two products; needs a norm."""


def row_products(x_NK: Tensor, stage: RowProducts, residual: Tensor | None = None) -> list[Tensor]:
    """Products ``[N, rows]`` of each matrix with the vectors ``x``, or ``swiglu`` of both, plus the residual. They have the type
    of ``x`` and are rounded where transformers rounds.

    Raises:
        ValueError: shapes that do not fit, or a residual with several products.
    """
    return composed(x_NK, stage, residual, rms_norm, swiglu)


def composed(
    x_NK: Tensor, stage: RowProducts, residual: Tensor | None, norm: Callable[..., Tensor], gate: Callable[..., Tensor]
) -> list[Tensor]:
    """``row_products`` in separate launches: PyTorch's products (one for pieces of one matrix), this norm and gate."""
    check_stage(x_NK, stage, residual)
    x = x_NK if stage.norm is None else norm(x_NK, stage.norm, stage.eps)[0]
    runs, made = list[list[Tensor]](), list[Tensor]()
    for weight, bias in zip(stage.weights, stage.biases, strict=True):
        if runs and bias is None and _follows(weight, runs[-1][-1]):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    for run, bias in zip(runs, stage.biases, strict=False):
        whole = run[0].as_strided((sum(map(len, run)), x.shape[1]), run[0].stride())
        made += F.linear(x, whole, bias).split([*map(len, run)], -1)
    made = [gate(*made)] if stage.gated else made
    return made if residual is None else [residual + made[0]]


def _follows(weight: Tensor, other: Tensor) -> bool:
    """Whether a weight ``[N, K]`` begins where the other one ends, as pieces of one matrix do."""
    end = other.storage_offset() + other.numel()
    same = weight.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and weight.storage_offset() == end and weight.is_contiguous() and other.is_contiguous()


def check_stage(x_NK: Tensor, stage: RowProducts, residual: Tensor | None) -> None:
    """Raise ValueError unless vectors, matrices and residual fit each other."""
    (N, K), rows = x_NK.shape, [len(weight) for weight in stage.weights]
    given = [(n, K) for n in rows] == [tuple(weight.shape) for weight in stage.weights] and 1 <= len(rows) <= 4
    biased = [x.shape for x in stage.biases if x is not None] in ([], [(n,) for n in rows])
    gated = not stage.gated or (stage.norm is not None and len(rows) == 2 and rows[0] == rows[1])
    added = residual is None or (residual.shape == (N, rows[0]) and (len(rows) == 1 or stage.gated))
    if not (given and biased and gated and added and (stage.norm is None or stage.norm.shape == (K,))):
        shapes = [None if x is None else tuple(x.shape) for x in (*stage.weights, *stage.biases, stage.norm, residual)]
        raise ValueError(f"x {tuple(x_NK.shape)} and weights, biases, norm, residual {shapes} do not belong together")


LAYOUT = cpp.HEADERS / "layout.h"
FORMAT, LINEAR, PACKED, ROWS = (cpp.Struct(LAYOUT, name) for name in ("Format", "Linear", "Packed", "Rows"))
LAYER, DECODER = (cpp.Struct(LAYOUT, name, Linear=LINEAR) for name in ("Layer", "Decoder"))


def load(dtype: torch.dtype, channels: int) -> cpp.Library:
    """The compiled step for weights of a dtype and heads of ``channels`` channels.

    Raises:
        cpp.Unavailable: another type or system, no compiler, or one that fails.
    """
    if channels > cpp.MAX_CHANNELS:
        raise cpp.Unavailable(f"heads of {channels} channels, more than {cpp.MAX_CHANNELS}")
    if dtype not in cpp.TYPES:
        raise cpp.Unavailable(f"weights of {str(dtype).removeprefix('torch.')}")
    return cpp.load(Path(__file__).with_name("cpu.cpp"), *cpp.head_options(dtype, channels))


@cache
def format_at(form: str) -> np.ndarray:
    """A format of few bits as the step finds it, with its compiled calls.

    Raises:
        cpp.Unavailable: it does not compile or run here.
    """
    size, library = FORMATS[form], product.load(form)
    rows, unpack = (ctypes.cast(call, ctypes.c_void_p).value for call in (library.locret_rows, library.locret_unpack))
    return FORMAT.of(block=size.block, nbytes=size.nbytes, rows=rows, unpack=unpack)


ADVICE = 14
"""``MADV_HUGEPAGE`` on Linux."""
PAGE = 1 << 21
ALIGNED = 32
"""Numbers from whose multiples a copy begins: a cache line."""


class Bf16Copies:
    """Room for copies of some weights.

    Args:
        weights: the weights to ask ``of`` for, each once; weights of other types than float32 take no room.
        library: the compiled step's.

    Attributes:
        read: bytes of the weights that were asked for, halved or not.
    """

    def __init__(self, weights: Iterable[Tensor], library: cpp.Library) -> None:
        """Make room for the copies of weights of any shape."""
        self._room = torch.empty(sum(_room_of(x) for x in weights), dtype=torch.bfloat16, device="cpu")
        self._library, self._copied = library, list[tuple[Tensor, Tensor]]()
        self._used = self.read = 0
        ask_for_large_pages(self._room)

    def of(self, weight: Tensor) -> Tensor | None:
        """The weight in bfloat16, of the same shape; None where that changes a number."""
        made, room = weight, _room_of(weight)
        if room:
            half = self._room[self._used : self._used + weight.numel()].view(weight.shape).copy_(weight.detach())
            if self._holds(weight, half):
                self._used, made = self._used + room, half
                self._copied.append((weight, half))
        self.read += made.nbytes
        return None if made is weight else made

    def unchanged(self) -> bool:
        """Whether every copy is what its weight is now: all numbers are read, at the speed of memory."""
        return all(self._holds(weight, half) for weight, half in self._copied)

    def _holds(self, weight: Tensor, half: Tensor) -> bool:
        """Whether the copy in bfloat16 has the same numbers, for weights of any shape."""
        same, places = np.zeros(1, np.int64), (weight.data_ptr(), half.data_ptr())
        self._library.locret_holds(*places, weight.numel(), same.ctypes.data, torch.get_num_threads())
        return bool(same[0])


def _room_of(weight: Tensor) -> int:
    """Numbers of room for a weight's copy, of any shape, aligned; 0 where it is not float32."""
    return -(-weight.numel() // ALIGNED) * ALIGNED if weight.dtype == torch.float32 else 0


def ask_for_large_pages(x: Tensor) -> None:
    """Ask the system for pages of 2 MiB under a tensor of any shape that was not written yet. It may decline."""
    first, end = -(-x.data_ptr() // PAGE) * PAGE, (x.data_ptr() + x.nbytes) // PAGE * PAGE
    if end > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ADVICE)
