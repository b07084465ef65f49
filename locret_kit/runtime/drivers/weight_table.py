"""A decoder's weights as the compiled call of a CPU reads them: addresses, and copies in half the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from locret_kernels import cpp, decoder_step
from locret_kernels.decoder_step import DECODER, LAYER, LINEAR, Bf16Copies

from ...backbones.weights import PRODUCTS, Dense, Product
from ...heads import RetainingHeads

NORMS = ("norm", "query_norm", "key_norm", "mlp_norm")
NO_HEADS = {name: (0,) * len(LINEAR.points) for name in ("fc1", "fc2")}
"""Fields of a layer without a retaining head."""


@dataclass
class WeightTable:
    """The decoder as the call reads it, its layers' addresses, copies of the weights that bfloat16 holds, and the weights, whose
    memory stays as long as these."""

    decoder: np.ndarray
    layers: np.ndarray
    copies: Bf16Copies
    weights: Dense | list[Tensor]

    @classmethod
    def of(cls, w: Dense, channels: int, library: cpp.Library) -> WeightTable:
        """The table of a backbone whose heads have ``channels`` channels."""
        dtype, layers = w.dtype, np.zeros(len(w.layers), LAYER.dtype)
        products = [product for layer in w.layers for product in layer.products]
        copies = Bf16Copies((product.weight for product in (*products, w.head)), library)
        for i, layer in enumerate(w.layers):
            norms = {name: getattr(layer, name) for name in NORMS}
            layers[i] = LAYER.of(
                dtype, **{name: norm and norm.weight for name, norm in norms.items()}, **NO_HEADS,
                **{name: _linear(getattr(layer, name), dtype, copies) for name in PRODUCTS}, norm_eps=layer.norm.eps,
                head_eps=layer.query_norm.eps if layer.query_norm is not None else 0.0, mlp_eps=layer.mlp_norm.eps,
                scaling=layer.scaling,
            )  # fmt: skip
        query, key, *_ = products
        decoder = DECODER.of(
            dtype, layers=len(w.layers), width=len(w.norm.weight), query_heads=len(query.weight) // channels,
            heads=len(key.weight) // channels, channels=channels, vocabulary=len(w.head.weight), words=_linear(w.words, dtype),
            norm=w.norm.weight, eps=w.norm.eps, head=_linear(w.head, dtype, copies), layer=layers.ctypes.data,
        )  # fmt: skip
        return cls(decoder, layers, copies, w)

    def with_heads(self, heads: RetainingHeads, dtype: torch.dtype, library: cpp.Library) -> WeightTable:
        """The same table with retaining heads, which the call then asks."""
        weights = [x.detach() for x in heads.parameters()]
        decoder, layers, copies = self.decoder.copy(), self.layers.copy(), Bf16Copies(weights, library)
        for i in range(len(layers)):
            for name in NO_HEADS:
                product = Product(getattr(heads[i], name).weight.detach(), None)
                layers[name][i] = _linear(product, dtype, copies)
        decoder["layer"] = layers.ctypes.data
        return WeightTable(decoder, layers, copies, weights)

    def is_current(self, weights: Dense | list[Tensor]) -> bool:
        """Whether the weights, of any shape, are still at the same addresses, and all copies still hold their
        numbers."""
        mine, theirs = (tree_map_only(Tensor, _place, x) for x in (self.weights, weights))
        return mine == theirs and self.copies.unchanged()


def _linear(product: Product, dtype: torch.dtype, copies: Bf16Copies | None = None) -> tuple[int, ...]:
    """A product as the call reads it; ``copies`` may hold its weight in half the size."""
    half = None if copies is None else copies.of(product.weight)
    weight, stored = (product.weight, dtype) if half is None else (half, torch.bfloat16)
    at = cpp.address(weight, stored if product.form is None else torch.uint8)
    return LINEAR.of(
        dtype, weight=at, bias=product.bias, rows=len(weight), halved=half is not None,
        format=product.form and decoder_step.format_at(product.form).ctypes.data,
    ).item()  # fmt: skip


def _place(x: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    """Address, sizes and type of a weight."""
    return x.data_ptr(), x.shape, x.dtype
