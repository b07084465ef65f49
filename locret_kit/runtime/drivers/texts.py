"""Decoding a token of each of several texts as one CUDA graph.

Rows are pages of one pool. The place of each text comes from a buffer of the device (``cache.texts.StepTables``), so a
graph serves every set of texts of the same number.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...cache.batch import Packed
from ...cache.bounded import BoundedCache
from ...cache.texts import batch_key, row_numbers
from ...cache.view import score_alike
from .capture import WARM, NoDriver, StepGraphs
from .dense import dense_step


def graph_key(cache: BoundedCache) -> Hashable:
    """Texts of equal keys share a graph. Raises NoDriver for a text that shares none."""
    ctx, pages = cache.context, [rows.page for rows in cache.bounded]
    if pages[0] is None:
        raise NoDriver("its rows are no pages of a pool")
    if (key := batch_key(ctx)) is None:
        raise NoDriver(f"positions={ctx.settings.positions!r} places rows of each text in its own way")
    if not score_alike([ctx]):
        raise NoDriver(f"policy={cache.policy.name!r} scores the new tokens of each text by themselves")
    return key, id(pages[0].pool), ctx.policy.score, ctx.settings.seed, ctx.first, id(ctx.heads)


class Form(NamedTuple):
    """All that tells one step from another: the texts, and which layers have rows of the same numbers."""

    texts: int
    layers: tuple[int, ...]


class TextsDriver(StepGraphs[Form]):
    """``driver(caches, tokens)`` gives the logits ``[texts, V]`` after a token more of each text, as the shared forward does.

    Args:
        model: attached. first: one of the texts; all texts have its ``graph_key``.
    """

    what = "a token of several texts"

    def __init__(self, model: PreTrainedModel, first: BoundedCache) -> None:
        super().__init__(model, WARM, math.inf)
        self.dense = dense_step(model, first.context)
        self.keepalive = first.context.ropes, first.context.heads, first.bounded[0].page
        """Objects by whose identity texts are alike."""
        self.given: dict[Form, Tensor] = {}
        """Buffers of the device: tokens ``[N]``, then four ``row_numbers`` for each kind of layers."""

    def _write(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> Form:
        layers = [row_numbers(rows) for rows in zip(*(cache.bounded for cache in caches), strict=True)]
        kinds = list(dict.fromkeys(layers))
        form = Form(len(caches), tuple(map(kinds.index, layers)))
        columns = [column for _, pages in kinds for column in zip(*pages, strict=True)]
        numbers = torch.tensor([tokens, *columns], device="cpu")
        if form not in self.given:
            with torch.inference_mode(False):
                self.given[form] = torch.zeros_like(numbers, device=self.model.device)
        self.given[form].copy_(numbers)
        return form

    def _step(self, form: Form, caches: Sequence[BoundedCache]) -> Tensor:
        given = self.given[form]
        packed = Packed(caches, [1] * form.texts, given[1:].unflatten(0, (-1, 4)))
        if self.dense is not None and form.texts == 1:
            logits_NV = self.dense(given[:1], packed)
        else:  # one matrix product reads weights once for all texts
            logits_NV = forward(self.model, given[:1], packed)[0].float()
        caches[0].context.tables.clear()  # they lie in the memory of graphs
        return logits_NV
