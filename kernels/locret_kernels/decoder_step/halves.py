"""Copies of float32 weights in bfloat16, one after another in large pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

ADVICE = 14
"""``MADV_HUGEPAGE`` on Linux."""
PAGE = 1 << 21
ALIGNED = 32
"""Numbers from whose multiples a copy begins: a cache line."""


class Halves:
    """Room for copies of some weights.

    Args:
        weights: those of which ``of`` may be asked, each once; what is not float32 takes no room.

    Attributes:
        read: bytes of the weights that were asked for, halved or not.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._room = torch.empty(sum(_room_of(x) for x in weights), dtype=torch.bfloat16, device="cpu")
        self._used = self.read = 0
        ask_for_large_pages(self._room)

    def of(self, weight: Tensor) -> Tensor | None:
        """The weight in bfloat16; None where that changes a number, or where its changes cannot be noticed."""
        half = None
        if room := _room_of(weight):
            half = self._room[self._used : self._used + weight.numel()].view(weight.shape).copy_(weight.detach())
            half = half if torch.equal(half.float(), weight) else None
            self._used += 0 if half is None else room
        self.read += weight.nbytes if half is None else half.nbytes
        return half


def _room_of(weight: Tensor) -> int:
    known = weight.dtype == torch.float32 and not weight.is_inference()  # those of inference mode have no version
    return -(-weight.numel() // ALIGNED) * ALIGNED if known else 0


def ask_for_large_pages(x: Tensor) -> None:
    """Ask the system for pages of 2 MiB under memory that was not written yet; it may decline."""
    first, end = -(-x.data_ptr() // PAGE) * PAGE, (x.data_ptr() + x.nbytes) // PAGE * PAGE
    if end > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ADVICE)
