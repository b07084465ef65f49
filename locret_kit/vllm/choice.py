"""Which engines have a bounded cache: those whose ``additional_config`` has the kit's section. vLLM's own attention serves
others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import SECTION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


def asked(vllm_config: VllmConfig | None = None) -> bool:
    """Whether an engine is to have a bounded cache; by default that which is being built."""
    if vllm_config is None:
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
    additional = getattr(vllm_config, "additional_config", None)
    return isinstance(additional, dict) and SECTION in additional


def __getattr__(name: str) -> type[AttentionBackend]:
    """``OnCpu``: the attention of the engine that is being built. vLLM looks it up by this name."""
    if name != "OnCpu":
        raise AttributeError(name)
    if asked():
        from .attention_backend import BoundedBackend

        return BoundedBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
