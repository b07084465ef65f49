"""First products of retaining heads folded into the projections before them, since heads read queries, keys and values before the
rotation: ``fc1 [q; k; v] = (fc1 W) x + fc1 b`` of a layer's normed input ``x``.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kernels.rows import HeadProduct

from ..backbones.decoder_attention import DecoderAttention
from ..backbones.decoder_modules import decoder_of, is_untouched
from ..backbones.products import Product, plain_projections
from ..heads import RetainingHead, RetainingHeads


class FoldedHead(NamedTuple):
    """A layer's retaining head."""

    weight_RC: Tensor
    bias_R: Tensor | None
    fc2_HR: Tensor

    def product(self, x_BTC: Tensor) -> HeadProduct:
        """Products of the head for tokens whose normed hidden states are ``x``."""
        return HeadProduct(F.linear(x_BTC, self.weight_RC, self.bias_R), self.fc2_HR)


FoldedHeads = Sequence[FoldedHead | None]
"""Folded head of every layer; None where something is between its projections and its attention, or it has a window."""
_KNOWN: WeakKeyDictionary[RetainingHeads, tuple[ref[PreTrainedModel], object, FoldedHeads]] = WeakKeyDictionary()


def fold_heads(model: PreTrainedModel, heads: RetainingHeads, description: DecoderAttention) -> FoldedHeads:
    """The heads of a model of their type; those of the last call where no weight has changed since, in whatever way."""
    if not description.projects or heads.config.activation != "silu":
        return [None] * len(heads.layers)
    decoder, paths = decoder_of(model), {call.layer: call.module for call in description.calls}
    found = [
        _foldable(head, decoder.get_submodule(paths[i])) if window is None else None
        for i, (head, window) in enumerate(zip(heads.layers, description.spec.windows, strict=True))
    ]
    there = [pair for pair in found if pair is not None]
    weights = [x for _, products in there for one in products for x in (one.weight, one.bias) if x is not None]
    weights += [linear.weight.detach() for head, _ in there for linear in (head.fc1, head.fc2)]
    signature, known = _signature(weights), _KNOWN.get(heads)
    if known is None or known[0]() is not model or known[1] != signature:
        _KNOWN.pop(heads, None)  # before another takes as much memory
        with torch.inference_mode(False), torch.no_grad():
            known = ref(model), signature, [None if pair is None else folded(*pair) for pair in found]
        _KNOWN[heads] = known
    return known[2]


def folded(head: RetainingHead, products: Sequence[Product]) -> FoldedHead:
    """A head behind these projections, multiplied in float64 and rounded once."""
    fc1_RE = head.fc1.weight.detach()
    parts = [*zip(fc1_RE.double().split([len(one.weight) for one in products], 1), products, strict=True)]
    weight_RC = torch.stack([part @ one.weight.double() for part, one in parts]).sum(0)
    biases = [part @ one.bias.double() for part, one in parts if one.bias is not None]
    bias_R = torch.stack(biases).sum(0).to(fc1_RE.dtype) if biases else None
    return FoldedHead(weight_RC.to(fc1_RE.dtype), bias_R, head.fc2.weight.detach())


def _foldable(head: nn.Module, attention: nn.Module) -> tuple[RetainingHead, list[Product]] | None:
    """A layer's head and projections, if they are plain ones of one type on one device."""
    found = plain_projections(attention)
    if found is None or not isinstance(head, RetainingHead) or not (is_untouched(head) and is_untouched(head.fc1)):
        return None
    fc1, kinds = head.fc1.weight, {(one.weight.dtype, one.weight.device) for one in found}
    whole = sum(len(one.weight) for one in found) == fc1.shape[1]  # sharded ones are empty
    return (head, found) if whole and kinds == {(fc1.dtype, fc1.device)} else None


def _signature(weights: Sequence[Tensor]) -> object:
    """Addresses of weights of any shape, and a sum of the bits of each: they are read once, at the speed of memory."""
    places = [(x.data_ptr(), x.shape, x.dtype) for x in weights]
    if not weights or weights[0].is_meta:
        return places
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [x.view(bits[x.element_size()]).sum().to(weights[0].device) for x in weights]  # layers may lie on several
    return places, torch.stack(sums).tolist()
