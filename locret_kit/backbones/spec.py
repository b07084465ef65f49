"""Dimensions of a backbone, as heads, caches and plans need them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..naming import nearest
from .libraries import layer_kinds
from .wrapped import unwrapped


class UnsupportedArchitecture(ValueError):
    """The model's attention, or its rotation, is of no form that the kit knows."""


@dataclass(frozen=True)
class AttentionLayer:
    """Sizes of one layer's attention, and which rows it sees."""

    n_heads: int
    n_kv_heads: int
    key_size: int
    """Channels of a query and of a key."""
    value_size: int
    window: int | None = None
    """Tokens that a token sees, its own included; None is all."""
    chunked: bool = False
    """Whether the window's tokens are those since the last multiple of ``window`` (Llama 4), not the newest."""
    index: int = field(default=0, compare=False)
    """Layer of the decoder."""

    @property
    def qkv_dim(self) -> int:
        """Width of the concatenation [q; k; v] of one token."""
        return (self.n_heads + self.n_kv_heads) * self.key_size + self.n_kv_heads * self.value_size

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Keys and values ``[1, H, 0, D]`` of no token."""
        shapes = ((1, self.n_kv_heads, 0, size) for size in (self.key_size, self.value_size))
        k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        return k, v

    @property
    def row_size(self) -> int:
        """Channels of a token's keys and values, of all heads."""
        return self.n_kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class StateSize:
    """One state of a layer that is no attention."""

    name: str
    """See ``States.tensors``."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for the model's own."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes in a model of a type."""
        return prod(self.shape) * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class BackboneSpec:
    """Dimensions of a backbone. Its layers are those with keys and values of their own, in the decoder's order. A state space
    layer, and a layer that reads another's keys, do not count."""

    model_type: str
    layers: tuple[AttentionLayer, ...]
    activation: str
    states: tuple[int, ...] = ()
    """Layers of the decoder that hold a state of constant size (state spaces, linear attention, short convolutions)."""
    shared: bool = False
    """Whether some layers read another layer's keys and values."""
    state_sizes: tuple[StateSize, ...] = field(default=(), compare=False)
    """Sizes of all states; empty where a configuration alone was read."""

    @property
    def n_layers(self) -> int:
        """Layers with rows."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens; None is full attention."""
        return tuple(layer.window for layer in self.layers)

    @property
    def first(self) -> AttentionLayer:
        """The first layer without a window, or the first of all."""
        return next((layer for layer in self.layers if layer.window is None), self.layers[0])

    @property
    def n_heads(self) -> int:
        """Query heads of ``first``."""
        return self.first.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads of ``first``."""
        return self.first.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a key of ``first``."""
        return self.first.key_size

    @property
    def qkv_dim(self) -> int:
        """Width of [q; k; v] of one token in ``first``."""
        return self.first.qkv_dim

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same heads, and values as many channels as keys."""
        sizes = {(one.n_heads, one.n_kv_heads, one.key_size, one.value_size) for one in self.layers}
        return len(sizes) == 1 and self.first.key_size == self.first.value_size


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
    dtypes = [name for name, value in torch.__dict__.items() if isinstance(value, torch.dtype)]
    words = [("hidden_act", fields.get("hidden_act"), [*ACT2FN]), ("dtype", fields.get("dtype"), dtypes)]
    words += [("rope_type", group.get("rope_type"), ["default", *ROPE_INIT_FUNCTIONS]) for group in groups]
    for name, word, known in words:
        if word is not None and word not in known:
            raise ValueError(f"{name}={word!r} is unknown.{nearest(str(word), known)}".removesuffix("."))


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the language part of a Hugging Face causal LM."""
    return unwrapped(model).config.get_text_config(decoder=True)


def activation_of(config: PreTrainedConfig) -> str:
    """Name of the activation between an MLP's products, for the heads."""
    named = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    return named if isinstance(named, str) and named in ACT2FN else "silu"


def spec_of(config: PreTrainedConfig) -> BackboneSpec:
    """Dimensions by the words of a (text) configuration, where there is no model: for plans, and for heads that say nothing of
    their backbone. ``probe.describe`` measures them.

    Raises:
        UnsupportedArchitecture: no layer has keys and values.
    """
    layers, states, shared = [], [], False
    for index, kind in enumerate(layer_kinds(config)):
        if kind.holds_state:
            states.append(index)
        shared |= kind.reads_another
        if not kind.has_rows:
            continue
        own, window = kind.config, kind.window
        # A window as long as the trained context (Phi-3-mini-128K: 262,144) never hides a token: full attention.
        if window is not None and window >= (getattr(config, "max_position_embeddings", None) or window + 1):
            window = None
        Q = field_of(own, "num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads") or 1
        H = field_of(own, "num_key_value_heads", "num_kv_heads") or Q
        if config.model_type == "jetmoe":  # experts of attention, each of which has the keys again
            H = Q
        hidden = field_of(own, "hidden_size", "n_embd", "d_model")
        key_size = value_size = field_of(own, "head_dim", "attention_head_dim") or hidden // Q
        if field_of(own, "kv_lora_rank"):  # latent attention: keys of two parts, expanded for every query head
            H, value_size = Q, field_of(own, "v_head_dim") or key_size
            key_size = (field_of(own, "qk_nope_head_dim") or 0) + (field_of(own, "qk_rope_head_dim") or 0) or key_size
        layers.append(AttentionLayer(Q, H, key_size, value_size, window, kind.chunked and window is not None, index))
    name = config.model_type
    if not layers:
        raise UnsupportedArchitecture(f"model_type={name!r} has no layer with keys and values: nothing to evict")
    return BackboneSpec(name, tuple(layers), activation_of(config), tuple(states), shared)


def field_of(config: PreTrainedConfig, *names: str) -> int:
    """The first of these fields that a configuration has; 0 without one."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int and value), 0)
