"""Choice between an operation's reference, its Triton kernel and its C++ for CPUs, by name or by the device's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEFINITIONS = "reference"
BACKENDS = (DEFINITIONS, "triton", "cpu")


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


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA card; ``(0, 0)`` of any other device: PyTorch calls ROCm's "cuda" too."""
    from torch import cuda, version

    return cuda.get_device_capability(device) if device.type == "cuda" and not version.hip else (0, 0)


def choose(backend: str | None, device: torch.device, head_size: int, dtype: torch.dtype) -> str:
    """Backend for a head size and a dtype on a device.

    A named backend is taken. By default it is ``triton`` on NVIDIA's cards in half precision, for head sizes with kernels, and
    ``reference`` elsewhere. A named backend that cannot run is an error here, before anything is allocated. It is never
    replaced by another.

    Raises:
        ValueError: an unknown backend, or a device, head size or type that it does not take.
        BackendUnavailable: Triton is due and not installed.
    """
    from torch import version

    named, due = backend, device.type == "cuda" and not version.hip and dtype.itemsize == 2
    backend = named or ("triton" if due else "reference")
    function("rotate_rows", backend)
    if backend == "triton":
        from . import common

        if named is None and head_size not in common.HEAD_SIZES:
            return "reference"
        common.head_blocks(head_size, dtype)
        if device.type not in ("cuda", "meta") and not common.INTERPRETED:
            raise ValueError(f"backend='triton' takes CUDA devices, not {device}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend='cpu' takes CPUs, not {device}")
    return backend
