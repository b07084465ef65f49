"""Options of every command that loads a backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Policies of your own."""

    plugin: str | None = None
    """A module, or a Python file, that brings policies of your own."""

    def load_plugin(self) -> None:
        """Make the plugin's policies known."""
        if self.plugin is not None:
            from ..policies import registry

            registry.load_plugin(self.plugin)


@dataclass(frozen=True, kw_only=True)
class Machine(Plugin):
    """The machine."""

    device: str | None = None
    """'cpu', 'cuda', 'cuda:1', ... Default: the best there is."""
    dtype: Dtype = "auto"
    """Precision of backbone and cache; auto is bfloat16, unless a CPU is slower with it."""
    weight_bits: Literal[8, 4] | None = None
    """Bits of the layers' weights, quantised by bitsandbytes as they are loaded. Default: as ``dtype``."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The backbone, its retaining heads and the policy."""

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository."""
    model: str | None = None
    """The backbone: a folder, a Hub id, or a GGUF file (a path; on the Hub user/name/FILE.gguf or user/name:Q4_K_M). Default: the
    one the heads name."""
    adapter: str | None = None
    """PEFT adapter for the backbone, or none. Default: the one the heads name."""
    policy: str | None = None
    """A policy's name or an expression. Default: what the heads were published with (locret, where they name none); without
    heads streaming."""
    list_policies: bool = False
    """Print every policy with its parts and leave."""
