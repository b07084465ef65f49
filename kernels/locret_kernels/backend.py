"""The one place that chooses between an operation's reference and its Triton kernel: by name, or by the device's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BACKENDS = ("reference", "triton")
FUNCTIONS = {
    "attend": "attend",
    "column_stats": "column_stats",
    "window_attention": "column_stats",
    "log_sum_exp": "column_stats",
    "column_max": "column_max",
    "score_head": "score_head",
    "select_rows": "select_compact",
    "compact_rows": "select_compact",
    "ragged_decode": "ragged_decode",
    "packed_decode": "ragged_decode",
    "rotate_rows": "rotate",
}
"""Function -> the folder that holds it."""


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot run here."""


@cache
def function(name: str, backend: str) -> Callable[..., Any]:
    """The function ``name`` of ``backend``.

    Raises:
        ValueError: an unknown function or backend.
        BackendUnavailable: Triton is asked for and not installed.
    """
    if name not in FUNCTIONS:
        raise ValueError(f"function={name!r} must be one of: {', '.join(FUNCTIONS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of: {', '.join(BACKENDS)}")
    try:
        module = import_module(f".{FUNCTIONS[name]}.{backend}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BackendUnavailable(f"backend={backend!r} needs the package triton, which is not installed") from error
    return getattr(module, name)


def choose(backend: str | None, device: torch.device, head_size: int, dtype: torch.dtype) -> str:
    """The backend for heads of this size and type on a device: the one that is named, or ``triton`` on CUDA in half
    precision, for which its kernels are made, and ``reference`` otherwise. What cannot run is an error here, before anything is
    allocated, never another backend.

    Raises:
        ValueError: an unknown backend, or a device, head size or type that it does not take.
        BackendUnavailable: Triton is due and not installed.
    """
    backend = backend or ("triton" if device.type == "cuda" and dtype.itemsize == 2 else "reference")
    function("attend", backend)
    if backend == "triton":
        from . import tiles

        tiles.head_blocks(head_size, dtype)
        if device.type != "cuda" and not tiles.INTERPRETED:
            raise ValueError(f"backend='triton' takes CUDA devices, not {device}")
    return backend
