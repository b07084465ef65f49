"""Fused operations for a bounded cache, one folder each, and refusals that they share.

A folder's ``__init__.py`` is the definition, in torch; ``triton.py`` has the same functions with the same signatures.
``locret_kernels.backend.function(name, backend)`` picks one and never falls back silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_nvidia(device: torch.device) -> bool:
    """Whether a device is a card of NVIDIA: PyTorch calls ROCm's "cuda" too."""
    from torch import version

    return device.type == "cuda" and version.hip is None


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA card; ``(0, 0)`` of any other device."""
    from torch import cuda

    return cuda.get_device_capability(device) if is_nvidia(device) else (0, 0)


def check_some(name: str, count: int, what: str) -> None:
    """Raise ValueError, naming the argument, where there are no ``what``."""
    if count < 1:
        raise ValueError(f"{name}: {count} {what} must be at least 1")


def check_keep(keep: int, rows: int) -> None:
    """Raise ValueError unless between one and all of the rows stay."""
    if not 1 <= keep <= rows:
        raise ValueError(f"index: {keep} rows must be at least 1 and at most the {rows} rows of a buffer")
