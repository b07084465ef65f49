"""Choice between an operation's reference and its Triton kernel, by name or by the device's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import isfunction
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BACKENDS = ("reference", "triton")


class BackendUnavailable(RuntimeError):
    """Error of a backend that was asked for and cannot run here."""


@cache
def functions() -> dict[str, str]:
    """Function -> the folder that exports it; every folder of this package is looked into."""
    package, found = import_module(__package__), {}
    for folder in (module.name for module in iter_modules(package.__path__) if module.ispkg):
        exports = import_module(f".{folder}", __package__)
        found |= {name: folder for name in exports.__all__ if isfunction(getattr(exports, name))}
    return found


@cache
def function(name: str, backend: str) -> Callable[..., Any]:
    """Function ``name`` of ``backend``.

    Raises:
        ValueError: an unknown function or backend.
        BackendUnavailable: Triton is asked for and not installed.
    """
    if name not in functions():
        raise ValueError(f"function={name!r} must be one of: {', '.join(functions())}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of: {', '.join(BACKENDS)}")
    try:
        module = import_module(f".{functions()[name]}.{backend}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BackendUnavailable(f"backend={backend!r} needs the package triton, which is not installed") from error
    return getattr(module, name)


def runnable(device: torch.device) -> tuple[str, ...]:
    """Backends that run on a device; on ``meta`` kernels are launched nowhere, so all of them."""
    from . import common

    return BACKENDS if device.type != "cpu" or common.INTERPRETED else ("reference",)


def choose(backend: str | None, device: torch.device, head_size: int, dtype: torch.dtype) -> str:
    """Backend for heads of this size and type on a device: the one that is named, otherwise ``triton`` on CUDA in half
    precision, for which its kernels are made, and ``reference`` elsewhere. A backend that cannot run is an error here, before
    anything is allocated, and never replaced by another.

    Raises:
        ValueError: an unknown backend, or a device, head size or type that it does not take.
        BackendUnavailable: Triton is due and not installed.
    """
    backend = backend or ("triton" if device.type == "cuda" and dtype.itemsize == 2 else "reference")
    function("attend", backend)
    if backend == "triton":
        from . import common

        common.head_blocks(head_size, dtype)
        if device.type not in ("cuda", "meta") and not common.INTERPRETED:
            raise ValueError(f"backend='triton' takes CUDA devices, not {device}")
    return backend
