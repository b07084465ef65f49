"""Copies of float32 weights in bfloat16, one after another in large pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from .. import cpp

ADVICE = 14
"""``MADV_HUGEPAGE`` on Linux."""
PAGE = 1 << 21
ALIGNED = 32
"""Numbers from whose multiples a copy begins: a cache line."""


class Halves:
    """Room for copies of some weights.

    Args:
        weights: those of which ``of`` may be asked, each once; what is not float32 takes no room.
        library: the compiled step's.

    Attributes:
        read: bytes of the weights that were asked for, halved or not.
    """

    def __init__(self, weights: Iterable[Tensor], library: cpp.Library) -> None:
        self._room = torch.empty(sum(_room_of(x) for x in weights), dtype=torch.bfloat16, device="cpu")
        self._library, self._copied = library, list[tuple[Tensor, Tensor]]()
        self._used = self.read = 0
        ask_for_large_pages(self._room)

    def of(self, weight: Tensor) -> Tensor | None:
        """The weight in bfloat16; None where that changes a number."""
        half = None
        if room := _room_of(weight):
            half = self._room[self._used : self._used + weight.numel()].view(weight.shape).copy_(weight.detach())
            half = half if self._holds(weight, half) else None
        if half is not None:
            self._used += room
            self._copied.append((weight, half))
        self.read += weight.nbytes if half is None else half.nbytes
        return half

    def hold(self) -> bool:
        """Whether every copy is what its weight is now: all numbers are read, at the speed of memory."""
        return all(self._holds(weight, half) for weight, half in self._copied)

    def _holds(self, weight: Tensor, half: Tensor) -> bool:
        same = np.zeros(1, np.int64)
        self._library.locret_holds(
            weight.data_ptr(), half.data_ptr(), weight.numel(), same.ctypes.data, torch.get_num_threads()
        )
        return bool(same[0])


def _room_of(weight: Tensor) -> int:
    return -(-weight.numel() // ALIGNED) * ALIGNED if weight.dtype == torch.float32 else 0


def ask_for_large_pages(x: Tensor) -> None:
    """Ask the system for pages of 2 MiB under memory that was not written yet; it may decline."""
    first, end = -(-x.data_ptr() // PAGE) * PAGE, (x.data_ptr() + x.nbytes) // PAGE * PAGE
    if end > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ADVICE)
