"""Decoding of one token of one text without the decoder's modules: six launches per layer of a Llama-like decoder, more with
norms of heads.

Matrix products are fused with the norm, gate or residual next to them (``locret_kernels.decoder_step``). Attention goes to the
forward's handler. A timed trial on the card compares fused with separate launches, once for each shape. The modules run where
separate launches win everywhere, and where a module was exchanged or has hooks.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kernels.backend import function
from locret_kernels.decoder_step import RowProducts, composed
from locret_kernels.rows import HeadProduct

from ...backbones.handlers import Handler, Softmax
from ...backbones.products import Product
from ...backbones.weights import Dense, DenseLayer, Norm, NotDense, check_dense, dense
from ...cache.context import Context
from ...cache.folded import FoldedHead
from ...cache.graphs import capture, quickest
from ...naming import first_line

logger = logging.getLogger(__name__)

Form = Callable[..., list[Tensor]]
"""``row_products`` in one of its forms."""
APART = "separate launches"
"""Name of the form with PyTorch's product (cuBLAS)."""
ROUNDING = 2**-5
"""Difference of products of bfloat16 by two forms, as a share of the largest, at most."""
_CHOSEN: dict[Hashable, str] = {}
_ALIKE: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose logits were found equal to those of their matrices."""


def forms(kernels: str) -> dict[str, Form]:
    """Forms by name. Without a card, where no trial runs, the last one is taken."""
    apart = partial(composed, norm=function("rms_norm", kernels), gate=function("swiglu", kernels))
    return {APART: apart, "one launch": function("row_products", kernels)}


def timings(stages: Sequence[RowProducts], kernels: str) -> dict[str, float]:
    """Seconds per stage of each form that runs on the card, over stages of one shape in one CUDA graph. A form whose products
    differ from those of separate launches is left out."""
    first = stages[0].weights[0]
    x_1K = torch.randn(1, first.shape[1], dtype=first.dtype, device=first.device)
    residual = None if stages[0].norm is not None else x_1K.new_zeros(1, len(first))

    def products(form: Form) -> Tensor:
        """All products of all stages, ``[1, N]``."""
        return torch.cat([made for stage in stages for made in form(x_1K, stage, residual)], 1)

    found, known = dict[str, float](), forms(kernels)
    wanted = products(known[APART])
    for name, form in known.items():
        try:
            if not bool((products(form) - wanted).abs().max() <= ROUNDING * wanted.abs().max()):  # NaN is no product
                raise ValueError("their products are not those of separate launches")
            run = capture(first.device, (), partial(products, form))[0].replay
            found[name] = quickest(run, first.device) / len(stages)
        except Exception as error:  # of the compiler or the card: other forms remain
            logger.warning("matrix products of a token do not run as %s: %s", name, first_line(error))
    return found


def _chosen(stages: Sequence[RowProducts], kernels: str) -> str:
    """Name of the fastest form of stages of one shape."""
    if not torch.cuda.is_available() or kernels != "triton":
        return [*forms(kernels)][-1]
    key = _shape(stages[0])
    if key not in _CHOSEN:
        found = timings(stages, kernels)
        logger.info("products %s: %s", key, ", ".join(f"{name} {1e6 * s:.1f} us" for name, s in found.items()))
        _CHOSEN[key] = min(found, key=found.__getitem__, default=APART)
    return _CHOSEN[key]


def _shape(stage: RowProducts) -> Hashable:
    """Everything that the time of a stage depends on."""
    first, biased = stage.weights[0], stage.biases[0] is not None
    sizes = *(len(weight) for weight in stage.weights), first.shape[1]
    return sizes, stage.norm is not None, stage.gated, biased, first.dtype, str(first.device)


class LayerStages(NamedTuple):
    """Launches of a layer with matrix products."""

    enter: RowProducts
    """Queries, keys and values, and the hidden layer of a folded retaining head."""
    out: RowProducts
    gate: RowProducts
    down: RowProducts


def stages_of(layer: DenseLayer, head: FoldedHead | None) -> LayerStages:
    """Stages of a layer and its folded retaining head."""
    folded = () if head is None else (Product(head.weight_RC, head.bias_R),)
    return LayerStages(
        _stage(layer.query, layer.key, layer.value, *folded, norm=layer.norm),
        _stage(layer.out),
        _stage(layer.gate, layer.up, norm=layer.mlp_norm)._replace(gated=True),
        _stage(layer.down),
    )


def _stage(*products: Product, norm: Norm | None = None) -> RowProducts:
    weights, biases = tuple(one.weight for one in products), [one.bias for one in products]
    if any(bias is not None for bias in biases):  # zeros where some have none
        biases = [one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias for one in products]
    return RowProducts(weights, tuple(biases), *(() if norm is None else (norm.weight, norm.eps)))


class DenseStep:
    """Forward of one token: ``step(ids, handler)`` gives the same logits ``[1, V]`` (float32) after a token ``ids [1, 1]``
    as the model's forward with this handler."""

    def __init__(self, model: PreTrainedModel, ctx: Context, weights: Dense) -> None:
        kernels = ctx.backend.kernels
        self.model, self.weights, self.channels = model, weights, ctx.spec.head_dim
        self.norm, self.heads = function("rms_norm", kernels), ctx.folded or [None] * len(weights.layers)
        stages = [*map(stages_of, weights.layers, self.heads)]
        alike: dict[Hashable, list[RowProducts]] = {}
        for stage in (stage for layer in stages for stage in layer):
            alike.setdefault(_shape(stage), []).append(stage)
        self.forms = {shape: _chosen(some, kernels) for shape, some in alike.items()}
        """Name of each shape's form."""
        known = forms(kernels)
        self.layers = [[partial(known[self.forms[_shape(stage)]], stage=stage) for stage in layer] for layer in stages]

    def __call__(self, ids_11: Tensor, handler: Handler) -> Tensor:
        """Logits ``[1, V]`` (float32). The handler sees the begin and the end of the forward."""
        handler.begin(self.model, {"input_ids": ids_11})
        x_1C = F.embedding(ids_11[0], self.weights.words.weight)
        for n in range(len(self.layers)):
            x_1C = self.layer(n, x_1C, handler)
        handler.finish(x_1C[None], ids_11)
        return self.weights.head(self._normed(x_1C, self.weights.norm)).float()

    def layer(self, n: int, x_1C: Tensor, handler: Handler) -> Tensor:
        """Hidden state ``[1, C]`` after layer ``n``."""
        (enter, out, gate, down), own, head = self.layers[n], self.weights.layers[n], self.heads[n]
        *made, last = enter(x_1C, residual=None)
        if head is None:
            made.append(last)
        q, k, v = (x.view(1, -1, 1, self.channels) for x in made)
        q, k = self._normed(q, own.query_norm), self._normed(k, own.key_norm)
        product = None if head is None else HeadProduct(last[None], head.fc2_HR)
        attended = handler.attend(n, q, k, v, Softmax(own.scaling), product)
        (x_1C,) = out(attended.transpose(1, 2).reshape(1, -1), residual=x_1C)
        (gated,) = gate(x_1C, residual=None)
        (x_1C,) = down(gated, residual=x_1C)
        return x_1C

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """The norm of ``x`` [..., C], if there is one."""
        return x if norm is None else self.norm(x, norm.weight, norm.eps)[0]


def dense_step(model: PreTrainedModel, ctx: Context) -> DenseStep | None:
    """Step of a model whose matrices give its logits; None where the modules run. Logits are compared once per model."""
    try:
        weights = dense(model)
        if ctx.ropes is None or weights.is_packed:
            return None
        if model not in _ALIKE and not weights.norm.weight.is_meta:
            check_dense(model, weights)
        _ALIKE.add(model)
    except NotDense as error:
        logger.info("a token runs through the decoder's modules: %s", error)
        return None
    step = DenseStep(model, ctx, weights)
    return step if {*step.forms.values()} != {APART} or not ctx.backend.launches else None
