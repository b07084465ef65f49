"""Which vLLM this is."""

from __future__ import annotations

from . import VERSIONS


def release() -> str:
    """Of the vLLM that is installed, without what a build adds."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def is_taken() -> bool:
    """Whether the plugin was tried in it."""
    return release() in VERSIONS


def check_version() -> None:
    """Raise RuntimeError for a release of vLLM in which the plugin was not tried."""
    if not is_taken():
        known = " or ".join(VERSIONS)
        raise RuntimeError(
            f"vllm=={release()}: locret_kit's plugin takes {known} alone: in the clone, pip install '.[vllm]'"
        )
