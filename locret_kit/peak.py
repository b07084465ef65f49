"""The most memory that was taken so far."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: the device's peak allocation, or on a CPU the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024
