"""Entry point of ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes, maybe more than once.

Nothing changes for an engine whose ``additional_config`` has no section of the kit's. What makes a plugin that did not load an
error is in ``requests``: another entry point, which vLLM does not leave aside.
"""

from __future__ import annotations

from .versions import is_taken


def register() -> None:
    """Put attention and rotary embedding in the place of vLLM's own, for engines that ask for it."""
    if not is_taken():
        return  # said where an engine asks for it: others may use this vLLM without the kit
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .rotary import register_rotary

    register_backend(AttentionBackendEnum.CPU_ATTN, "locret_kit.vllm.choice.OnCpu")
    register_backend(AttentionBackendEnum.CUSTOM, "locret_kit.vllm.attention_backend.BoundedBackend")
    register_rotary()


def registered() -> bool:
    """Whether ``register`` has done its work in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CPU_ATTN.is_overridden() and AttentionBackendEnum.CUSTOM.is_overridden()
