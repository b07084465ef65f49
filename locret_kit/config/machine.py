"""Options of every command that loads a backbone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    template_kwargs: str | None = None
    """Arguments of the chat template, as JSON: '{"enable_thinking": false}' switches off the thoughts of models that have such a
    switch."""
    weight_bits: Literal[8, 4] | None = None
    """Bits of the layers' weights, quantised by bitsandbytes as they are loaded. Default: as ``dtype``."""

    def set_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give the tokenizer's template its arguments. Raises ValueError for what it does not take, or what is no JSON."""
        if self.template_kwargs is None:
            return
        from ..text.template import DEFAULTS, render_messages

        try:
            arguments = json.loads(self.template_kwargs)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"template_kwargs={self.template_kwargs:.64} must be an object of JSON")
        render_messages(tokenizer, [{"role": "user", "content": "?"}], arguments=arguments)
        setattr(tokenizer, DEFAULTS, arguments)


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The backbone, its retaining heads and the policy."""

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: with --model none, else the demo's, for
    SmolLM2-135M-Instruct."""
    model: str | None = None
    """The backbone: a folder, a Hub id, or a GGUF file (a path; on the Hub user/name/FILE.gguf or user/name:Q4_K_M). Default: the
    one the heads name."""
    adapter: str | None = None
    """PEFT adapter for the backbone, or none. Default: the one the heads name."""
    policy: str | None = None
    """A policy's name or an expression. Default: what the heads were published with (locret, where they name none); without
    heads compactor; locret-infer with the demo's heads and a question rereading-locret."""
    list_policies: bool = False
    """Print every policy with its parts and leave."""
