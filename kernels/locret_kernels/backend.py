"""Choice between an operation's reference, its Triton kernel and its C++ for CPUs, by name or by the device's rule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from . import is_nvidia

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
BACKENDS = ("reference", "triton", "cpu")


class BackendUnavailable(RuntimeError):
    """Error of a backend that was asked for and cannot run here."""


@cache
def functions() -> dict[str, str]:
    """Function -> the folder that exports it; every folder of this package is looked into."""
    package, found = import_module(__package__), {}
    for folder in (module.name for module in iter_modules(package.__path__) if module.ispkg):
        found |= dict.fromkeys(getattr(import_module(f".{folder}", __package__), "__all__", ()), folder)
    return found


@cache
def function(name: str, backend: str) -> Callable[..., Any]:
    """Function ``name`` of ``backend``; where an operation has no form for CPUs, its reference.

    Raises:
        ValueError: an unknown function or backend.
        BackendUnavailable: Triton is asked for and not installed, or of an operation without kernels for it.
    """
    for what, given, known in (("function", name, functions()), ("backend", backend, BACKENDS)):
        if given not in known:
            raise ValueError(f"{what}={given!r} must be one of: {', '.join(known)}")
    try:
        found = form_of(name, backend) or (form_of(name, "reference") if backend == "cpu" else None)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BackendUnavailable(f"backend={backend!r} needs the package triton, which is not installed") from error
    if found is None:
        raise BackendUnavailable(f"function={name!r} has no form for backend={backend!r}")
    return found


def form_of(name: str, backend: str) -> Callable[..., Any] | None:
    """Function ``name`` of the file for ``backend`` in its folder, whose own the reference is; None where that lacks it."""
    place = f"{__package__}.{functions()[name]}" + f".{backend}" * (backend != "reference")
    return getattr(import_module(place), name, None) if find_spec(place) else None


def runnable(name: str, device: torch.device) -> tuple[str, ...]:
    """Backends whose form of function ``name`` runs on a device; on ``meta`` kernels are launched nowhere, so Triton's does."""
    from . import common

    on_cpu = device.type == "cpu"
    runs = {"reference": True, "triton": not on_cpu or common.INTERPRETED, "cpu": on_cpu}
    return tuple(backend for backend, here in runs.items() if here and form_of(name, backend))


@cache
def _has_kernels(head_size: int) -> bool:
    """Whether there are kernels for a head size; says so once where not."""
    function("rotate_rows", "triton")
    from .common import HEAD_SIZES

    if head_size not in HEAD_SIZES:
        logger.warning(
            "heads of %d have no kernels (%s have), so PyTorch's operations run", head_size, list(HEAD_SIZES)
        )
    return head_size in HEAD_SIZES


def choose(backend: str | None, device: torch.device, head_size: int, dtype: torch.dtype) -> str:
    """Backend for a head size and a dtype on a device.

    A named backend is taken. By default it is ``triton`` on NVIDIA's cards in half precision, and ``reference`` elsewhere
    and, with a warning, for heads of a size without kernels. A named backend that cannot run is an error here, before
    anything is allocated. It is never replaced by another.

    Raises:
        ValueError: an unknown backend, or a device, head size or type that it does not take.
        BackendUnavailable: Triton is due and not installed.
    """
    if backend is None:
        due = is_nvidia(device) and dtype.itemsize == 2
        backend = "triton" if due and _has_kernels(head_size) else "reference"
    function("rotate_rows", backend)
    if backend == "triton":
        from . import common

        common.head_blocks(head_size, dtype)
        if device.type not in ("cuda", "meta") and not common.INTERPRETED:
            raise ValueError(f"backend='triton' takes CUDA devices, not {device}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend='cpu' takes CPUs, not {device}")
    return backend
