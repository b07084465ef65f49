"""The release of vLLM that the kit takes."""

from __future__ import annotations

from ..naming import first_line, install_line

VERSIONS = ("0.32.0",)
"""Releases of vLLM in which the kit was tried: no other is taken."""


def release() -> str:
    """The release of vLLM that is installed, without what a build adds.

    Raises:
        ImportError: there is none. RuntimeError: it fails as it is imported.
    """
    try:
        import vllm
    except ImportError:
        raise
    except Exception as error:
        raise RuntimeError(f"vllm cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    return str(getattr(vllm, "__version__", "unknown")).partition("+")[0]


def check_version() -> None:
    """Raise RuntimeError for a release of vLLM in which the kit was not tried."""
    if (found := release()) not in VERSIONS:
        raise RuntimeError(f"vllm=={found}: locret_kit takes {' or '.join(VERSIONS)} alone: {install_line('vllm')}")
