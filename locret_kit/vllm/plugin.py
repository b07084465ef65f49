"""The plugin of ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes, maybe more than once.

Nothing changes for engines that ask for no bounded cache. A plugin that did not load is an error in ``requests``: another entry
point, which vLLM does not leave aside.
"""

from __future__ import annotations

from ..naming import install_line
from . import VERSIONS


def register() -> None:
    """Put attention and rotary embedding in the place of vLLM's own, for engines that ask for it."""
    if release() not in VERSIONS:
        return  # an error where an engine asks for it: others may use this vLLM without the kit
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .rotary import register_rotary

    register_backend(AttentionBackendEnum.CPU_ATTN, "locret_kit.vllm.choice.OnCpu")
    register_backend(AttentionBackendEnum.CUSTOM, "locret_kit.vllm.attention_backend.BoundedBackend")
    register_rotary()


def is_registered() -> bool:
    """Whether ``register`` has done its work in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CPU_ATTN.is_overridden() and AttentionBackendEnum.CUSTOM.is_overridden()


def release() -> str:
    """The release of vLLM that is installed, without what a build adds."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def check_version() -> None:
    """Raise RuntimeError for a release of vLLM in which the plugin was not tried."""
    if release() not in VERSIONS:
        raise RuntimeError(
            f"vllm=={release()}: locret_kit's plugin takes {' or '.join(VERSIONS)} alone: {install_line('vllm')}"
        )
