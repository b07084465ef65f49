"""Choice between vLLM's attention and a bounded cache, for the engine that is being built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .worker_state import State, section_of

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend


def is_bounded() -> bool:
    """Whether it is the engine for which ``Requests`` was made."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and State.section is not None and section_of(config) is State.section


def __getattr__(name: str) -> type[AttentionBackend]:
    """``OnCpu``: its attention. vLLM looks it up by this name."""
    if name != "OnCpu":
        raise AttributeError(name)
    if is_bounded():
        from .attention_backend import BoundedBackend

        return BoundedBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
