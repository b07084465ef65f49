"""Decoding a token of each of several texts as one CUDA graph.

Rows are pages of one pool. The place of each text comes from a buffer of the device (``cache.texts.StepTables``), so a
graph serves every set of texts of the same number. Texts are cut between two steps. The host's counts follow every
step, so a text may be decoded in another way at any token.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...cache.batch import Packed
from ...cache.bounded import BoundedCache
from ...cache.context import Context
from ...cache.step import evict_if_due, make_room
from ...cache.texts import batch_key, row_numbers
from ...cache.view import score_alike
from .capture import WARM, StepGraphs
from .dense import dense_step


class NoSharedGraph(ValueError):
    """Reason why a text shares no graph with others."""


def texts_key(cache: BoundedCache) -> Hashable:
    """Texts of equal keys share a graph. Raises NoSharedGraph for a text that has none."""
    ctx, pages = cache.context, [rows.page for rows in cache.bounded]
    if pages[0] is None:
        raise NoSharedGraph("its rows are no pages of a pool")
    if (key := batch_key(ctx)) is None:
        raise NoSharedGraph(f"positions={ctx.settings.positions!r} places rows of each text in its own way")
    if not score_alike([ctx]):
        raise NoSharedGraph(f"policy={cache.policy.name!r} scores the new tokens of each text by themselves")
    return key, id(pages[0].pool), ctx.policy.score, ctx.settings.seed, id(ctx.heads)


class Form(NamedTuple):
    """All that tells one step from another: the texts, and which layers have rows of the same numbers."""

    texts: int
    layers: tuple[int, ...]


class Followed(NamedTuple):
    """A text as the last step left it."""

    context: Context
    seen: int
    left: int
    """Tokens until rows are cut."""


class TextsDriver(StepGraphs[Form]):
    """``driver(caches, tokens)`` gives the logits ``[texts, V]`` after a token more of each text, as the shared forward does.

    Args:
        model: attached. first: one of the texts; all texts have its ``texts_key``.
    """

    what = "a token of several texts"

    def __init__(self, model: PreTrainedModel, first: BoundedCache) -> None:
        super().__init__(model, WARM, math.inf)
        self.dense = dense_step(model, first.context)
        self.held = first.context.ropes, first.context.heads, first.bounded[0].page
        """Objects by whose identity texts are alike."""
        self.given: dict[Form, Tensor] = {}
        """Buffers of the device: tokens ``[N]``, then four ``row_numbers`` for each kind of layers."""
        self._followed: WeakKeyDictionary[BoundedCache, Followed] = WeakKeyDictionary()

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next token can come here."""
        return self.reason is None

    def __call__(self, caches: Sequence[BoundedCache], tokens: Sequence[int]) -> Tensor:
        """Logits ``[N, V]`` after one more token of each of ``N`` texts."""
        followed = [self._with_room(cache) for cache in caches]
        layers = [row_numbers(rows) for rows in zip(*(cache.bounded for cache in caches), strict=True)]
        kinds = list(dict.fromkeys(layers))
        form = Form(len(caches), tuple(map(kinds.index, layers)))
        columns = [column for _, pages in kinds for column in zip(*pages, strict=True)]
        numbers = torch.tensor([tokens, *columns], device="cpu")
        if form not in self.given:
            with torch.inference_mode(False):
                self.given[form] = torch.zeros_like(numbers, device=self.model.device)
        self.given[form].copy_(numbers)
        logits_NV = self._run(form, partial(self._step, form, caches), partial(_undo, caches)).clone()
        for cache, before in zip(caches, followed, strict=True):
            cache.state.unfinished = True
            for rows in cache.bounded:
                rows.count(1)
            if before.left == 1:
                evict_if_due(cache.context, cache.bounded)
            self._followed[cache] = before._replace(seen=before.seen + 1, left=before.left - 1)
            cache.state.unfinished = False
        return logits_NV

    def _with_room(self, cache: BoundedCache) -> Followed:
        """A text as it stands, with room for a token in every layer."""
        ctx, seen, followed = cache.context, cache.get_seq_length(), self._followed.get(cache)
        if followed is not None and followed.context is ctx and followed.seen == seen and followed.left:
            return followed
        make_room(ctx, cache.bounded, 1)
        return Followed(ctx, seen, ctx.until_cut(cache.bounded))

    def _step(self, form: Form, caches: Sequence[BoundedCache]) -> Tensor:
        """The captured step: logits ``[N, V]`` (float32). No number of the host may matter on the device."""
        given = self.given[form]
        packed = Packed(caches, [1] * form.texts, given[1:].unflatten(0, (-1, 4)))
        if self.dense is not None and form.texts == 1:
            logits_NV = self.dense(given[:1], packed)
        else:  # one matrix product reads weights once for all texts
            logits_NV = forward(self.model, given[:1], packed)[0].float()
        caches[0].context.tables.clear()  # they lie in the memory of graphs
        return logits_NV


def _undo(caches: Sequence[BoundedCache]) -> None:
    for cache in caches:
        cache.state.unfinished = False
