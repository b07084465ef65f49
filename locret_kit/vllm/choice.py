"""Attention of a CPU: the kit's for an engine that asks for it, vLLM's own for others. vLLM looks the name up for every
engine."""

from __future__ import annotations

from typing import Any

from .plugin import asked


def __getattr__(name: str) -> Any:
    if name != "OnCpu":
        raise AttributeError(name)
    if asked():
        from .backend import BoundedBackend

        return BoundedBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
