"""A decoder's weights as plain matrices and vectors, for those who compute without its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .families import decoder_of, has_adapter, text_config
from .fused import is_rms_norm
from .intercept import is_own_hook


class NotDense(ValueError):
    """The decoder is not of the known form; says what is different."""


@dataclass(frozen=True)
class Product:
    """``x @ weight.T + bias``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Norm:
    """A norm as Llama's."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class DenseLayer:
    """``x += out(attention(norm(x)))``, then ``x += down(silu(gate(h)) * up(h))`` with ``h = mlp_norm(x)``."""

    norm: Norm
    query: Product
    key: Product
    value: Product
    query_norm: Norm | None
    """Of each head's channels, before RoPE."""
    key_norm: Norm | None
    out: Product
    mlp_norm: Norm
    gate: Product
    up: Product
    down: Product
    scaling: float
    """Of the logits of attention."""


@dataclass(frozen=True)
class Dense:
    """A decoder and the product that makes logits of its last hidden state."""

    words: Tensor
    layers: tuple[DenseLayer, ...]
    norm: Norm
    head: Product


def dense(model: Any) -> Dense:
    """The weights of a model; nothing is copied.

    Raises:
        NotDense: another architecture, modules that were exchanged (adapters, quantised weights), hooks, or several devices.
    """
    config = text_config(model)
    if not has_adapter(config):
        raise NotDense(f"model_type={config.model_type!r} has no adapter")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise NotDense("the backbone's layers are spread over ranks")
    if model.training:
        raise NotDense("the backbone is in training mode")
    if getattr(config, "hidden_act", None) != "silu":
        raise NotDense("its MLPs have another activation than SiLU")
    decoder, head = decoder_of(model), model.get_output_embeddings()
    for module in (*decoder.modules(), head):
        if not type(module).__module__.startswith(("transformers.", "torch.nn.")):  # what it does is its own
            raise NotDense(f"a {type(module).__name__} stands in for a module of the backbone")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if hasattr(module, "_hf_hook") or not all(map(is_own_hook, hooks)):
            raise NotDense(f"a {type(module).__name__} of the backbone has hooks")
    words = decoder.embed_tokens
    if type(words) is not nn.Embedding:
        raise NotDense(f"its words are a {type(words).__name__}")
    found = Dense(words.weight, tuple(map(_layer, decoder.layers)), _norm(decoder.norm), _product(head))
    tensors = [x for x in (*decoder.parameters(), head.weight)]
    if any(type(x) not in (Tensor, nn.Parameter) or not x.is_contiguous() for x in tensors):
        raise NotDense("weights that are no plain tensors")
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        raise NotDense("weights of several types or on several devices")
    return found


def _layer(layer: Any) -> DenseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if len([module for module in layer.children() if is_rms_norm(module)]) != 2:
        raise NotDense("its layers have other norms than Llama's")
    Q, D = attention.config.num_attention_heads, attention.head_dim
    if hasattr(attention, "qkv_proj"):
        both = _product(attention.qkv_proj)
        H = (len(both.weight) // D - Q) // 2
        query, key, value = _pieces(both, (Q * D, H * D, H * D))
    else:
        query, key, value = (_product(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
    if hasattr(mlp, "gate_up_proj"):
        both = _product(mlp.gate_up_proj)
        gate, up = _pieces(both, (len(both.weight) // 2,) * 2)
    else:
        gate, up = _product(mlp.gate_proj), _product(mlp.up_proj)
    normed = hasattr(attention, "q_norm")
    return DenseLayer(
        norm=_norm(layer.input_layernorm),
        query=query, key=key, value=value,
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        out=_product(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=gate, up=up, down=_product(mlp.down_proj),
        scaling=attention.scaling,
    )  # fmt: skip


def _product(module: Any) -> Product:
    if type(module) is not nn.Linear:
        raise NotDense(f"a {type(module).__name__} among its matrices")
    return Product(module.weight, module.bias)


def _pieces(both: Product, rows: tuple[int, ...]) -> list[Product]:
    biases = both.bias.split(rows) if both.bias is not None else [None] * len(rows)
    return [Product(weight, bias) for weight, bias in zip(both.weight.split(rows), biases, strict=True)]


def _norm(module: Any) -> Norm:
    if not is_rms_norm(module):
        raise NotDense(f"a {type(module).__name__} among its norms")
    return Norm(module.weight, module.variance_epsilon)
