"""Entry point of ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes, maybe more than once.

Nothing changes for an engine whose ``additional_config`` has no section of the kit's. What makes a plugin that did not load an
error is in ``requests``: another entry point, which vLLM does not leave aside.
"""

from __future__ import annotations

from typing import Any

from . import SECTION, VERSIONS


def asked(vllm_config: Any = None) -> bool:
    """Whether an engine is to have a bounded cache; by default that which is being built."""
    if vllm_config is None:
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
    additional = getattr(vllm_config, "additional_config", None)
    return isinstance(additional, dict) and SECTION in additional


def register() -> None:
    """Put attention and rotary embedding in the place of vLLM's own, for engines that ask for it."""
    import vllm

    if vllm.__version__.partition("+")[0] not in VERSIONS:
        return  # said where an engine asks for it: others may use this vLLM without the kit
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .rotary import register_rotary

    register_backend(AttentionBackendEnum.CPU_ATTN, "locret_kit.vllm.choice.OnCpu")
    register_backend(AttentionBackendEnum.CUSTOM, "locret_kit.vllm.backend.BoundedBackend")
    register_rotary()


def registered() -> bool:
    """Whether ``register`` has done its work in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CPU_ATTN.is_overridden() and AttentionBackendEnum.CUSTOM.is_overridden()
