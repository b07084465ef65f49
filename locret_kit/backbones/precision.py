"""Precision of a backbone whose user names none (``dtype=auto``): bfloat16, unless the processor is slower with it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F
from transformers.configuration_utils import PreTrainedConfig

from .patches import lacks_bfloat16

TOKENS = 512
"""Rows of the product that is timed: a chunk of a prompt."""
MAX_WEIGHTS = 1 << 21
"""Weights of the product that is timed, so that it takes milliseconds."""
ROUNDS = 5
"""Times that each is timed, by turns; the shortest counts."""


@dataclass(frozen=True)
class Precision:
    """A type and the reason for it."""

    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}: {self.reason}"


def choose_precision(device: torch.device, config: PreTrainedConfig) -> Precision:
    """The precision of a backbone on a device. On a CPU both types are timed, once for each width of backbones in a process."""
    if device.type != "cpu":
        return Precision(torch.bfloat16, f"{device.type} computes in it")
    if lacks_bfloat16():
        return Precision(torch.float32, "this processor widens bfloat16 to it")
    return _measured(config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


@cache
def _measured(width: int, rows: int) -> Precision:
    """bfloat16, which takes half the memory, unless a product of an MLP's matrix, or of as many of its rows as may be, takes
    longer with it."""
    rows = max(1, min(rows, MAX_WEIGHTS // width))
    wide, half = seconds(rows, width)
    dtype, sign = (torch.bfloat16, "<=") if half <= wide else (torch.float32, ">")
    return Precision(
        dtype,
        f"{TOKENS} tokens by {rows} x {width} took {1e3 * half:.1f} ms in bfloat16 {sign} {1e3 * wide:.1f} in float32",
    )


def seconds(rows: int, width: int) -> tuple[float, float]:
    """Shortest times of the product in float32 and in bfloat16."""
    shortest = [float("inf")] * 2
    pairs = [
        [torch.ones(size, width, dtype=dtype, device="cpu") for size in (TOKENS, rows)]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for i, (x, weight) in enumerate(pairs):
                began = time.perf_counter()
                F.linear(x, weight)
                shortest[i] = min(shortest[i], time.perf_counter() - began)
    return shortest[0], shortest[1]
