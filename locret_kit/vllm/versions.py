"""Which vLLM this is."""

from __future__ import annotations

from . import VERSIONS


def check_version() -> None:
    """Raise RuntimeError for a release of vLLM in which the plugin was not tried."""
    import vllm

    found = vllm.__version__.partition("+")[0]
    if found not in VERSIONS:
        raise RuntimeError(
            f"vllm=={found}: locret_kit's plugin takes {' or '.join(VERSIONS)} alone: pip install 'locret-kit[vllm]'"
        )
