"""Dimensions of a backbone, as heads, caches and plans need them, where its decoder stands, and the states of its layers that are
no attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..naming import nearest
from .libraries import layer_kinds
from .undo import has_own_forward
from .wrapped import unwrapped

# ---- modules of a decoder of Llama's form, with the members that are read by name -----------------------------------

# Modules of another form lack some of them.


class RmsNorm(nn.Module):
    """A norm that scales the rounded, normed input by its weight."""

    weight: Tensor
    variance_epsilon: float


class GatedMlp(nn.Module):
    """An MLP whose two inward products are apart, or in one matrix as Phi-3's."""

    gate_up_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module


class Attention(nn.Module):
    """Attention with its four products."""

    config: PreTrainedConfig
    head_dim: int
    scaling: float


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual around both."""

    input_layernorm: nn.Module
    self_attn: Attention
    post_attention_layernorm: nn.Module
    mlp: GatedMlp


class DecoderStack(PreTrainedModel):
    """A stack of layers, without a head of the language model."""

    layers: Sequence[Layer]
    rotary_emb: nn.Module


class DecoderOutput(Protocol):
    """Output of a forward of the stack."""

    last_hidden_state: Tensor


Forward = Callable[..., DecoderOutput]
"""The stack's own, or what stands in its place."""


def is_rms_norm(module: Any) -> TypeGuard[RmsNorm]:
    """Whether a module is a norm as Llama's."""
    name = type(module).__name__
    return name.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and is_untouched(module)


def device_of(module: nn.Module) -> torch.device | None:
    """Device on which a module computes: of its weights, or that to which accelerate brings them; None without weights."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    brought = (getattr(hook, "execution_device", None) for hook in hooks)
    places = [*(x.device for x in module.parameters() if not x.is_meta), *(x for x in brought if x is not None)]
    return torch.device(places[0]) if places else None


def is_untouched(module: Any) -> bool:
    """Whether a module has no hooks and its own forward."""
    return has_own_forward(module) and not (module._forward_hooks or module._forward_pre_hooks)


def is_gated(mlp: nn.Module) -> TypeGuard[GatedMlp]:
    """Whether a module is an MLP as Llama's, or as Phi-3's."""
    inward = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    products = [getattr(mlp, name, None) for name in (*inward, "down_proj")]
    return all(isinstance(product, nn.Module) for product in products)


def is_silu(mlp: nn.Module) -> bool:
    """Whether the activation between an MLP's products is SiLU."""
    named = (getattr(mlp, name, None) for name in ("act_fn", "activation_fn", "act"))
    return any(type(one).__name__ in ("SiLU", "SiLUActivation") and is_untouched(one) for one in named)


# ---- dimensions of a backbone, as heads, caches and plans need them, and where its decoder stands ----


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


def decoder_of(model: PreTrainedModel) -> DecoderStack:
    """The decoder stack (``model.model`` and its likes) below wrappers and heads of the language model."""
    inner: Any = unwrapped(model)
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner.base_model
    if isinstance(decoder, nn.Linear):  # a head that is called decoder (ModernBERT)
        decoder = inner.base_model
    while hasattr(decoder, "lm_head") and hasattr(decoder, "model"):  # with a head of its own inside (Llama 4)
        decoder = decoder.model
    return decoder._modules.get("_orig_mod", decoder)


# ---- logits that a language model makes of final hidden states, with all that it does beside its output layer -------

# A scale (Granite, Cohere), a cap (Gemma 2).


M = TypeVar("M", bound=nn.Module)


class _FinalStates(MoeModelOutputWithPast):
    """Output of a decoder: its final hidden states. All else is None, as where a forward was not asked for it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def own_logits(model: PreTrainedModel, hidden_BTE: Tensor, ids_BT: Tensor) -> Tensor:
    """Logits [B, T, V], by the model's own forward around its decoder.

    Args:
        hidden_BTE: final hidden states of the decoder. ids_BT: any token ids.
    """
    decoder = decoder_of(model)
    path = next(name for name, module in model.named_modules() if module is decoder)
    # Copies of the modules on the way, since other threads may run the model meanwhile.
    outermost = _shallow(model)
    copied: nn.Module = outermost
    for name in path.split("."):
        inner = copied._modules[name] = _shallow(cast(nn.Module, copied._modules[name]))
        copied = inner
    copied.__dict__["forward"] = lambda *args, **kwargs: _FinalStates(last_hidden_state=hidden_BTE)
    logits: Tensor = type(outermost).forward(outermost, input_ids=ids_BT, use_cache=False, return_dict=True).logits
    return logits


def _shallow(module: M) -> M:
    """A copy of a module with the same parameters and submodules, so that a submodule can be replaced. It uses the forward of its
    class, because a patched forward calls the original module."""
    new = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__["_modules"] = dict(module._modules)
    new.__dict__.pop("forward", None)
    return new


# ---- states of constant size of layers that are no attention: state spaces, linear attention, short convolutions ----

# They live in transformers' own cache layers, which the backbone's modules write. A text's states are one object, so that whoever
# copies, saves or forgets the text's rows does the same with them.


class States:
    """States of one text.

    Attributes:
        cache: transformers' own; only its layers with a state are used.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache

    @classmethod
    def of(cls, model: PreTrainedModel, spec: BackboneSpec) -> States | None:
        """States of an empty text; None if the backbone has attention alone."""
        return cls(DynamicCache(config=text_config(model))) if spec.states else None

    def tensors(self) -> dict[str, Tensor]:
        """States of any shape by name ``states.LAYER.KIND.NUMBER``, of the layers that have started."""
        found = {}
        for index, layer in enumerate(self.cache.layers):
            for kind in ("conv_states", "recurrent_states"):
                for number, state in getattr(layer, kind, {}).items():
                    if state is not None:
                        found[f"states.{index}.{kind}.{number}"] = state
        return found

    def fill(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Load the states that ``tensors`` returned, of any shape, into an empty text."""
        for name, state in tensors.items():
            _, index, kind, number = name.split(".")
            layer: Any = self.cache.layers[int(index)]
            own = state.to(device, copy=True)
            layer.lazy_initialization(**{kind: own, "state_idx": int(number)})
            getattr(layer, kind)[int(number)].copy_(own)
            layer.has_previous_state[int(number)] = True

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.tensors().values())


class StatefulCache(Cache):
    """A cache whose layers hold attention alone. The states of other layers are in the text's ``States``."""

    def _states(self) -> States | None:
        """None if the backbone has attention alone, or is not known yet."""
        raise NotImplementedError

    def get_conv_state(self, *args: int, **named: int) -> Tensor | None:
        """A layer's convolution state, of any shape, or None."""
        return self._own_layers().get_conv_state(*args, **named)

    def update_conv_state(self, conv_states: Tensor, *args: int, **named: int) -> Tensor:
        """Store a layer's convolution state, of any shape, and return it."""
        with torch.inference_mode(False):  # one that begins in inference mode is written outside of it too
            return self._own_layers().update_conv_state(conv_states, *args, **named)

    def get_recurrent_state(self, *args: int, **named: int) -> Tensor | None:
        """A layer's recurrent state, of any shape, or None."""
        return self._own_layers().get_recurrent_state(*args, **named)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: int, **named: int) -> Tensor:
        """Store a layer's recurrent state, of any shape, and return it."""
        with torch.inference_mode(False):
            return self._own_layers().update_recurrent_state(recurrent_states, *args, **named)

    def has_previous_state(self, *args: int | None, **named: int | None) -> bool:
        states = self._states()
        return states is not None and bool(states.cache.has_previous_state(*args, **named))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _own_layers(self) -> Cache:
        if (states := self._states()) is None:
            raise ValueError("a layer asks for its state, which this cache was not made for")
        return states.cache
