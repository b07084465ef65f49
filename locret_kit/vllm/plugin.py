"""The plugin of ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes, maybe more than once.

An engine has a bounded cache where its ``additional_config`` has the kit's section. Nothing changes for others. A plugin that did
not load is an error in ``requests``: another entry point, which vLLM does not leave aside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import SECTION, VERSIONS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


def register() -> None:
    """Put attention and rotary embedding in the place of vLLM's own, for engines that ask for it."""
    if release() not in VERSIONS:
        return  # an error where an engine asks for it: others may use this vLLM without the kit
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .rotary import register_rotary

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.OnCpu")
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
            f"vllm=={release()}: locret_kit's plugin takes {' or '.join(VERSIONS)} alone: in the clone, pip install '.[vllm]'"
        )


def is_bounded(vllm_config: VllmConfig | None = None) -> bool:
    """Whether an engine is to have a bounded cache; by default that which is being built."""
    if vllm_config is None:
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return False
    return isinstance(vllm_config.additional_config, dict) and SECTION in vllm_config.additional_config


def __getattr__(name: str) -> type[AttentionBackend]:
    """``OnCpu``: the attention of the engine that is being built. vLLM looks it up by this name."""
    if name != "OnCpu":
        raise AttributeError(name)
    if is_bounded():
        from .attention_backend import BoundedBackend

        return BoundedBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
