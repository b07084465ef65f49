"""A decoder's weights as plain matrices and vectors, for those who compute without its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kernels.fused import rms_norm

from .gguf.gguf_model import PackedEmbedding, PackedLinear, packed_product, unpacked_rows
from .patches import is_own_hook
from .probe import describe
from .rope import rotate
from .spec import Layer, decoder_of, is_rms_norm, is_silu
from .wrapped import has_own_forward

PACKED = (PackedEmbedding, PackedLinear)
"""Modules beside PyTorch's and transformers' whose weights are known."""


PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")
"""Matrices of a layer."""


class NotDense(ValueError):
    """The decoder is not of the known form; says what is different."""


@dataclass(frozen=True)
class Product:
    """``x @ weight.T + bias``.

    Attributes:
        form: format of a packed matrix; None of a plain one.
    """

    weight: Tensor
    bias: Tensor | None
    form: str | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.form is None:
            return F.linear(x, self.weight, self.bias)
        return packed_product(x, self.weight, self.form, self.bias)


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

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(getattr(self, name) for name in PRODUCTS)


@dataclass(frozen=True)
class Dense:
    """A decoder and the product that makes logits of its last hidden state.

    Attributes:
        words: rows of the tokens; nothing is multiplied with them.
    """

    words: Product
    layers: tuple[DenseLayer, ...]
    norm: Norm
    head: Product

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return self.norm.weight.dtype

    @property
    def is_packed(self) -> bool:
        """Whether a matrix is."""
        products = (self.words, self.head, *(product for layer in self.layers for product in layer.products))
        return any(product.form is not None for product in products)


def dense(model: PreTrainedModel) -> Dense:
    """The weights of a model; nothing is copied, and memory that the model lets go of meanwhile stays.

    Raises:
        NotDense: another architecture, modules that were exchanged (adapters, quantised weights), hooks, or several devices.
    """
    if model.training:
        raise NotDense("the backbone is in training mode")
    decoder, head = decoder_of(model), model.get_output_embeddings()
    for module in (model, *decoder.modules(), head):
        known = type(module) in PACKED or type(module).__module__.startswith(("transformers.", "torch.nn."))
        if not known:  # what it does is its own
            raise NotDense(f"a {type(module).__name__} stands in for a module of the backbone")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        patched = not has_own_forward(module) or nn.modules.module._has_any_global_hook()
        if patched or not all(map(is_own_hook, hooks)):
            raise NotDense(f"a {type(module).__name__} of the backbone has hooks, or the forward of another")
    description = describe(model)
    if (unlike := description.unlike_llama) is not None:
        raise NotDense(unlike)
    if not description.fuses_layers:
        raise NotDense("its layers are not Llama's: other norms, residuals or experts")
    if description.scales_queries:
        raise NotDense("its queries are scaled by their positions")
    try:
        words = _words(decoder.embed_tokens)
        found = Dense(words, tuple(map(_layer, decoder.layers)), _norm(decoder.norm), _product(head))
    except AttributeError as error:
        raise NotDense(f"a module of another name: {error}") from error
    tensors = [*decoder.parameters(), *head.parameters()]
    if any(type(x) not in (Tensor, nn.Parameter) or not x.is_contiguous() for x in tensors):
        raise NotDense("weights that are no plain tensors")
    plain = {x.dtype for x in tensors if x.is_floating_point()}
    if len(plain) > 1 or len({x.device for x in tensors}) > 1:
        raise NotDense("weights of several types or on several devices")
    return found


@torch.no_grad()
def check_dense(model: PreTrainedModel, weights: Dense) -> None:
    """Raise NotDense where the model's own logits of a few tokens are not those that its weights give by the form of ``Dense``:
    words may be scaled, logits capped, and heads normed otherwise."""
    description, (D,) = describe(model), {layer.key_size for layer in describe(model).spec.layers}
    ids_T = torch.arange(2, 6, device=weights.norm.weight.device)
    x = weights.words.weight[ids_T]
    if weights.words.form is not None:
        x = unpacked_rows(x, weights.words.form, weights.dtype)
    for layer, rope in zip(weights.layers, description.ropes(model, len(ids_T)), strict=True):
        normed = _normed(x, layer.norm)
        q, k, v = (
            product(normed).unflatten(-1, (-1, D)).transpose(0, 1) for product in (layer.query, layer.key, layer.value)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = _normed(q, layer.query_norm), _normed(k, layer.key_norm)
        cos, sin = rope.tables(torch.arange(len(ids_T), device=x.device), x.dtype)
        q, k = rotate(q[None], cos, sin), rotate(k[None], cos, sin)
        out = F.scaled_dot_product_attention(q, k, v[None], is_causal=True, scale=layer.scaling, enable_gqa=True)
        x = x + layer.out(out[0].transpose(0, 1).flatten(1))
        normed = _normed(x, layer.mlp_norm)
        x = x + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
    logits = weights.head(_normed(x, weights.norm))
    own = model(input_ids=ids_T[None], use_cache=False).logits[0]
    # Packed matrices round activations to 8 bits: the last bit of a number may turn a code.
    allowed = 1e-3 if x.dtype.itemsize > 2 and not weights.is_packed else 0.1
    if not bool((logits.float() - own.float()).abs().max() <= allowed * own.float().abs().max()):
        raise NotDense("its logits are not what its matrices give by the form of Llama's")


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)[0]


def _layer(layer: Layer) -> DenseLayer:
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


def _words(module: object) -> Product:
    if type(module) is PackedEmbedding:
        return Product(module.weight.detach(), None, module.form)
    if type(module) is not nn.Embedding:
        raise NotDense(f"its words are a {type(module).__name__}")
    return Product(module.weight.detach(), None)


def _product(module: Any) -> Product:
    if type(module) not in (PackedLinear, nn.Linear):
        raise NotDense(f"a {type(module).__name__} among its matrices")
    bias = None if module.bias is None else module.bias.detach()
    return Product(module.weight.detach(), bias, getattr(module, "form", None))


def _pieces(both: Product, rows: tuple[int, ...]) -> list[Product]:
    biases = both.bias.split(rows) if both.bias is not None else [None] * len(rows)
    parts = zip(both.weight.split(rows), biases, strict=True)
    return [Product(weight, bias, both.form) for weight, bias in parts]


def _norm(module: object) -> Norm:
    if not is_rms_norm(module):
        raise NotDense(f"a {type(module).__name__} among its norms")
    return Norm(module.weight.detach(), module.variance_epsilon)
