"""A decoder's weights as plain matrices and vectors, for those who compute without its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locret_kernels.fused import rms_norm

from .fused import is_rms_norm, is_silu
from .intercept import is_own_hook
from .probe import describe
from .rope import rotate
from .spec import decoder_of


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
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise NotDense("the backbone's layers are spread over ranks")
    if model.training:
        raise NotDense("the backbone is in training mode")
    decoder, head = decoder_of(model), model.get_output_embeddings()
    for module in (*decoder.modules(), head):
        if not type(module).__module__.startswith(("transformers.", "torch.nn.")):  # what it does is its own
            raise NotDense(f"a {type(module).__name__} stands in for a module of the backbone")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if hasattr(module, "_hf_hook") or not all(map(is_own_hook, hooks)):
            raise NotDense(f"a {type(module).__name__} of the backbone has hooks")
    description = describe(model)
    if (unlike := description.unlike_llama) is not None:
        raise NotDense(unlike)
    if not description.fuses_layers:
        raise NotDense("its layers are not Llama's: other norms, residuals or experts")
    try:
        words = decoder.embed_tokens
        if type(words) is not nn.Embedding:
            raise NotDense(f"its words are a {type(words).__name__}")
        found = Dense(words.weight, tuple(map(_layer, decoder.layers)), _norm(decoder.norm), _product(head))
    except AttributeError as error:
        raise NotDense(f"a module of another name: {error}") from error
    tensors = [x for x in (*decoder.parameters(), head.weight)]
    if any(type(x) not in (Tensor, nn.Parameter) or not x.is_contiguous() for x in tensors):
        raise NotDense("weights that are no plain tensors")
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        raise NotDense("weights of several types or on several devices")
    return found


@torch.no_grad()
def check_dense(model: Any, weights: Dense) -> None:
    """Raise NotDense where the model's own logits of a few tokens are not those that its weights give by the form of ``Dense``:
    words may be scaled, logits capped, and heads normed otherwise."""
    description, (D,) = describe(model), {layer.key_size for layer in describe(model).spec.layers}
    ids_T = torch.arange(2, 6, device=weights.words.device)
    x = weights.words[ids_T]
    for layer, rope in zip(weights.layers, description.ropes(model, len(ids_T)), strict=True):
        normed = _normed(x, layer.norm)
        q, k, v = (
            F.linear(normed, product.weight, product.bias).unflatten(-1, (-1, D)).transpose(0, 1)
            for product in (layer.query, layer.key, layer.value)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = _normed(q, layer.query_norm), _normed(k, layer.key_norm)
        cos, sin = rope.tables(torch.arange(len(ids_T), device=x.device), x.dtype)
        q, k = rotate(q[None], cos, sin), rotate(k[None], cos, sin)
        out = F.scaled_dot_product_attention(q, k, v[None], is_causal=True, scale=layer.scaling, enable_gqa=True)
        x = x + F.linear(out[0].transpose(0, 1).flatten(1), layer.out.weight, layer.out.bias)
        normed = _normed(x, layer.mlp_norm)
        gate, up = (F.linear(normed, one.weight, one.bias) for one in (layer.gate, layer.up))
        x = x + F.linear(F.silu(gate) * up, layer.down.weight, layer.down.bias)
    logits = F.linear(_normed(x, weights.norm), weights.head.weight, weights.head.bias)
    own = model(input_ids=ids_T[None], use_cache=False).logits[0]
    allowed = 1e-3 if x.dtype.itemsize > 2 else 0.1
    if not bool((logits.float() - own.float()).abs().max() <= allowed * own.float().abs().max()):
        raise NotDense("its logits are not what its matrices give by the form of Llama's")


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)[0]


def _layer(layer: Any) -> DenseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if len([module for module in layer.children() if is_rms_norm(module)]) != 2:
        raise NotDense("its layers have other norms than Llama's")
    if not is_silu(mlp):
        raise NotDense("its MLPs have another activation than SiLU")
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
