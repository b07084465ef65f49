"""Choice between vLLM's attention and a bounded cache: engines have one whose ``additional_config`` has the kit's section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import SECTION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


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
