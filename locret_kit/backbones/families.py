"""One adapter per family: which architectures the kit reads before RoPE, and their dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..naming import nearest
from .rope import Rope

# ``model_type`` of the configuration -> what is special. All of these rotate halves and keep one rotary module at the
# decoder; they differ in where windows apply and in how frequencies are looked up.
FAMILIES: dict[str, str] = {
    "llama": "Llama 2 and 3, SmolLM2, TinyLlama, Yi",
    "mistral": "Mistral",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3 (q and k are read after their norms, before RoPE)",
    "phi3": "Phi-3 (fused qkv, LongRoPE)",
    "gemma3_text": "Gemma 3 (sliding-window layers keep their window)",
}


class UnsupportedArchitecture(ValueError):
    """The model has no adapter, so retaining heads cannot read its q, k and v before RoPE."""


@dataclass(frozen=True)
class BackboneSpec:
    """Dimensions of a backbone, as the heads and the cache need them."""

    model_type: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    activation: str
    windows: tuple[int | None, ...]
    """Attention window of each layer in tokens; None is full attention."""

    @property
    def qkv_dim(self) -> int:
        """Width of the concatenation [q; k; v] of one token."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


def check_config(fields: Mapping) -> None:
    """Raise ValueError naming the first field of a ``config.json`` that no model can be built from."""
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
    for name in (*sizes, "max_position_embeddings"):
        value, most = fields.get(name), 10_000 if name == "num_hidden_layers" else 2**31
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(f"{name}={value!r} must be an integer from 1 to {most}")
    heads, kv_heads, head_dim = (fields.get(name) for name in sizes[1:4])
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    if head_dim and head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even")
    ends = fields.get("eos_token_id")
    if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends]) if end is not None):
        raise ValueError(f"eos_token_id={ends!r} must be an integer or a list of integers")
    rope = fields.get("rope_parameters") or {}
    groups = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    dtypes = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    words = [("hidden_act", fields.get("hidden_act"), [*ACT2FN]), ("dtype", fields.get("dtype"), dtypes)]
    words += [("rope_type", group.get("rope_type"), ["default", *ROPE_INIT_FUNCTIONS]) for group in groups]
    for name, word, known in words:
        if word is not None and word not in known:
            raise ValueError(f"{name}={word!r} is unknown.{nearest(str(word), known)}".removesuffix("."))


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the language part of a Hugging Face causal LM."""
    return model.config.get_text_config(decoder=True)


def spec_of(config: PreTrainedConfig) -> BackboneSpec:
    """Read the dimensions from a (text) configuration; works for any decoder, adapter or not."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    # A window as long as the trained context (Phi-3-mini-128K: 262,144) never hides a token: full attention.
    if window is not None and window >= config.max_position_embeddings:
        window = None
    n_layers = config.num_hidden_layers
    if types:
        windows = tuple(window if kind == "sliding_attention" else None for kind in types[:n_layers])
    else:
        windows = (window,) * n_layers
    return BackboneSpec(
        model_type=config.model_type,
        n_layers=n_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        activation=getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu",
        windows=windows,
    )


def has_adapter(config: PreTrainedConfig) -> bool:
    """Whether q, k and v of this architecture can be read before RoPE."""
    return config.model_type in FAMILIES


def require_adapter(config: PreTrainedConfig) -> None:
    """Raise ``UnsupportedArchitecture`` that lists the families there are."""
    if not has_adapter(config):
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedArchitecture(
            f"model_type={config.model_type!r} has no adapter; retaining heads and compact positions work with: {known}. "
            "A policy without heads, such as snapkv, runs at original positions"
        )


def ropes_of(model: PreTrainedModel, span: int) -> list[Rope]:
    """One ``Rope`` per layer. ``span`` (tokens) is the largest position of the prompt plus one: it chooses between the
    short and the long factors of LongRoPE and sets dynamic NTK, once, for the whole prompt."""
    config = text_config(model)
    rotary = decoder_of(model).rotary_emb
    by_type: dict[str | None, Rope] = {}
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for kind in set(types):
        per_type = isinstance(rotary.rope_type, dict)
        rope_type = rotary.rope_type[kind] if per_type else rotary.rope_type
        if rope_type in ("longrope", "dynamic"):
            key = {"layer_type": kind} if per_type else {}
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, rotary.inv_freq.device, seq_len=span, **key)
        elif per_type:
            inv_freq = getattr(rotary, f"{kind}_inv_freq")
            scaling = getattr(rotary, f"{kind}_attention_scaling")
        else:
            inv_freq, scaling = rotary.inv_freq, rotary.attention_scaling
        by_type[kind] = Rope(inv_freq, scaling)
    return [by_type[kind] for kind in types]


def decoder_of(model: Any) -> Any:
    """The decoder stack (``model.model`` and its likes) below adapters of PEFT and heads of the language model."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner.base_model
    return decoder
