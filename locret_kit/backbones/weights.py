"""A backbone's weights as plain matrices and vectors, for computing without its modules."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kernels.fused import rms_norm
from locret_kernels.product import unpack

from .bfloat16 import is_own_hook
from .decoder_modules import Layer, decoder_of, is_rms_norm, is_silu
from .gguf.gguf_model import PackedEmbedding, PackedLinear
from .probe import describe
from .products import PLAIN, NotDense, Product, pieces, product_of, projections
from .rope import rotate
from .undo import has_own_forward

PACKED = (PackedEmbedding, PackedLinear)
"""Modules beside PyTorch's and transformers' whose weights are known."""


PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")
"""Matrices of a layer."""


class Norm(NamedTuple):
    """A norm as Llama's."""

    weight: Tensor
    eps: float


class DenseLayer(NamedTuple):
    """``x += out(attention(norm(x)))``, then ``x += down(silu(gate(h)) * up(h))`` with ``h = mlp_norm(x)``."""

    norm: Norm
    query: Product
    key: Product
    value: Product
    query_norm: Norm | None
    """Norm of each head's channels, before RoPE."""
    key_norm: Norm | None
    out: Product
    mlp_norm: Norm
    gate: Product
    up: Product
    down: Product
    scaling: float
    """Factor of the logits of attention."""

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(getattr(self, name) for name in PRODUCTS)


class Dense(NamedTuple):
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
        found = Dense(words, tuple(map(_layer, decoder.layers)), _norm(decoder.norm), product_of(head))
    except AttributeError as error:
        raise NotDense(f"a module of another name: {error}") from error
    tensors = [*decoder.parameters(), *head.parameters()]
    if any(type(x) not in PLAIN or not x.is_contiguous() for x in tensors):
        raise NotDense("weights that are no plain tensors")
    plain = {x.dtype for x in tensors if x.is_floating_point()}
    if len(plain) > 1 or len({x.device for x in tensors}) > 1:
        raise NotDense("weights of several types or on several devices")
    return found


@torch.no_grad()
def check_dense(model: PreTrainedModel, weights: Dense) -> None:
    """Raise NotDense if the model's own logits of a few tokens differ from those of its weights in the form of ``Dense``. Some
    models scale words, cap logits, or norm heads in another way."""
    description, (D,) = describe(model), {layer.key_size for layer in describe(model).spec.layers}
    ids_T = torch.arange(2, 6, device=weights.norm.weight.device)
    x = weights.words.weight[ids_T]
    if weights.words.form is not None:
        x = unpack(x, weights.words.form).to(weights.dtype)
    for layer, rope in zip(weights.layers, description.ropes(model, len(ids_T)), strict=True):
        normed = _normed(x, layer.norm)
        made = (product(normed) for product in (layer.query, layer.key, layer.value))
        q, k, v = (x.unflatten(-1, (-1, D)).transpose(0, 1) for x in made)
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
    """The norm of ``x``, of shape [..., C]."""
    return rms_norm(x, norm.weight, norm.eps)[0]


def _layer(layer: Layer) -> DenseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if len([module for module in layer.children() if is_rms_norm(module)]) != 2:
        raise NotDense("its layers have other norms than Llama's")
    if not is_silu(mlp):
        raise NotDense("its MLPs have another activation than SiLU")
    query, key, value = projections(attention)
    if hasattr(mlp, "gate_up_proj"):
        both = product_of(mlp.gate_up_proj)
        gate, up = pieces(both, (len(both.weight) // 2,) * 2)
    else:
        gate, up = product_of(mlp.gate_proj), product_of(mlp.up_proj)
    normed = hasattr(attention, "q_norm")
    return DenseLayer(
        norm=_norm(layer.input_layernorm),
        query=query, key=key, value=value,
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        out=product_of(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=gate, up=up, down=product_of(mlp.down_proj),
        scaling=attention.scaling,
    )  # fmt: skip


def _words(module: Any) -> Product:
    if type(module) not in (PackedEmbedding, nn.Embedding):
        raise NotDense(f"its words are a {type(module).__name__}")
    return Product(module.weight.detach(), None, getattr(module, "form", None))


def _norm(module: object) -> Norm:
    if not is_rms_norm(module):
        raise NotDense(f"a {type(module).__name__} among its norms")
    return Norm(module.weight.detach(), module.variance_epsilon)
