"""Steps of fixed shapes: their kernels, sizes and addresses never change, so that a CUDA graph can replay them.

A step appends one token, or a chunk of a prompt, to every layer and attends to its rows. Where in the text its tokens stand is a
number on the device. So is how many rows there are before a single token: rows are written at an index, and attention masks by
length. Chunks find as many rows again and again once the cache is full. When a layer is full is known to the host, since every
head of a layer holds as many rows: a step that evicts is a graph of its own.
Host-side counts follow every step, and the device's follow the host's, so any forward may come in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...backbones.weights import weight_bits_of
from ...cache.bounded import BoundedCache
from ...cache.context import Pins
from ...cache.due import Due
from ...cache.step import StaticStep, evict_if_due, make_room
from ...cache.storage.rows import COUNTS
from ...policies.capabilities import reason
from .capture import WARM, StepGraphs
from .dense import dense_step

CHUNKS = 6
"""Fewest chunks left of a prompt for a capture. The third chunk that leaves a full cache is captured."""
MOST_GRAPHS = 4
"""Captured forms of a step; a form beyond them runs without a graph."""


def _reason_against(model: PreTrainedModel, cache: BoundedCache) -> str | None:
    """Why this cache cannot be decoded with fixed shapes; None where it can, as far as settings tell."""
    if (why := reason("graph", cache.context.subject)) is not None:
        return why
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the backbone lies on several devices"
    if weight_bits_of(model) == 8:
        return "weights of 8 bits, whose products make the host look for large activations"
    if any(rows.state for rows in cache.bounded):
        return f"the score of policy={cache.policy.name!r} keeps tensors of its own between tokens"
    return None


class LayerForm(NamedTuple):
    """A layer's form: whether it is cut before or after a step, and for chunks every number of the host that its
    kernels depend on."""

    layer: int
    rows: int
    since_eviction: int
    """Tokens since the layer's last eviction; 0 for a layer with a window, where nothing asks."""
    due: Due | None
    """None where the step runs without its cuts."""
    pins: Pins = ()


Form = tuple[LayerForm, ...]
"""A step."""


class GraphDriver(StepGraphs[Form]):
    """``driver([cache], [token])`` gives the logits ``[1, V]`` after a token of its one text, as the dynamic forward does; with
    ``tokens`` above 1 ``driver([cache], ids)`` those after a chunk ``[tokens]`` of its prompt.

    On CUDA a form of the step that has run before is captured, then replayed; elsewhere the very same function runs as it
    is. ``reason`` says why nothing (more) is captured, once that is known; the caller then decodes dynamically.

    Args:
        model: attached, and bound to the cache.
        cache: after its prompt, or after a chunk. Before it ``takes`` may be asked, and no token comes.
    """

    def __init__(self, model: PreTrainedModel, cache: BoundedCache, tokens: int = 1) -> None:
        super().__init__(model, WARM if tokens == 1 else 2, MOST_GRAPHS)
        self.cache, self.tokens, self.reason = cache, tokens, _reason_against(model, cache)
        self.what = f"a {'token' if tokens == 1 else 'chunk'} of policy={cache.policy.name!r}"
        self.cuts_captured = True
        """Whether evictions are inside the graphs: unless the policy's make the host wait."""
        self.evictions = cache.counters.evictions
        """Evictions of the layer with the most, before the first step."""
        self.changes: dict[Form, list[int]] = {}
        """Counts on the host that a step of a graph adds to."""
        self._held: list[list[tuple[Tensor, Tensor]]] = []
        """Tables of rotation that graphs read: a dynamic forward in between would free them."""
        if tokens > 1 and cache.context.stages:
            self.reason = f"policy={cache.policy.name!r} does more with a chunk than attend and evict"
        if self.reason is not None or not cache.get_seq_length():
            return
        if tokens == 1:
            self.dense = dense_step(model, cache.context)
        with torch.inference_mode(False):
            self.ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
            self.seen = torch.zeros((), dtype=torch.int64, device=model.device)
            self.offset_T = torch.arange(tokens, dtype=torch.int32, device=model.device)
            self.length_L = torch.zeros(len(cache.bounded), dtype=torch.int64, device=model.device)
            self.flats = [rows.varlen() for rows in cache.bounded] if tokens == 1 else []
        self.followed: list[int] = []
        """Tokens and rows of the cache that the device's counts describe."""
        self.uncut, self.context = 0, cache.context
        """Next tokens that cut no layer, as far as is known, while the cache is as it was followed."""
        self._follow()

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next step can come here: any token, and a chunk after which every layer without a window is cut."""
        T, dues = self.tokens, ((rows, cache.context.due(rows, self.tokens)) for rows in cache.bounded)
        steady = T == 1 or all(due.tokens == T and (due.evict_after or rows.window) is not None for rows, due in dues)
        return steady and self.reason is None

    # ---- a step --------------------------------------------------------------------------------------------------

    def __call__(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> Tensor:
        """Logits ``[1, V]`` (float32) after the last of the tokens."""
        if isinstance(tokens, Tensor):
            self.ids[0] = tokens
        else:
            self.ids.fill_(tokens[0])
        self._follow()
        form = () if self.uncut else self._form()
        if self.cuts_captured:
            logits = self._count(form).clone()
        else:
            self._cut(form, "evict_before")
            logits = self._count(self._form(cut=False)).clone()
            self._cut(form, "evict_after")
        self.followed, self.uncut = self._followed(), max(0, self.uncut - 1)
        return logits

    def _followed(self) -> list[int]:
        return [self.cache.get_seq_length(), *self.cache.kept_rows]

    def _follow(self) -> None:
        """Bring the device's counts to the host's, which another forward, or tokens that were taken back, may have moved."""
        if (held := self._followed()) != self.followed or self.cache.context is not self.context:
            self.uncut, self.context = 0, self.cache.context
            self.seen.fill_(held[0])
            for layer, rows in enumerate(held[1:]):
                self.length_L[layer].fill_(rows)

    def _form(self, cut: bool = True) -> Form:
        """The next step; without its cuts where it is not to ``cut``. Sets ``uncut`` where a token has none."""
        layers, ctx, form = self.cache.bounded, self.cache.context, []
        for layer, rows in enumerate(layers):
            due = ctx.due(rows, self.tokens)
            if self.tokens > 1 or (cut and (due.evict_before is not None or due.evict_after is not None)):
                fresh = rows.since_eviction if rows.window is None else 0
                form.append(LayerForm(layer, rows.rows, fresh, due if cut else None, ctx.pins))
        if not form:  # the last token of those may be followed by a cut
            self.uncut = ctx.until_cut(layers) - 1
        return tuple(form)

    def _count(self, form: Form) -> Tensor:
        """Logits ``[1, V]`` of one form of the step; the host's counts follow."""
        replayed = form in self.graphs
        counts = [] if replayed else self._counts()
        logits = self._run(form, partial(self._step, form), partial(self._undo, counts))
        if replayed and not form:
            for rows in self.cache.bounded:
                rows.count(1)
        elif replayed:
            self._set_counts([n + more for n, more in zip(self._counts(), self.changes[form], strict=True)])
        elif form in self.graphs:
            self.changes[form] = [new - old for new, old in zip(self._counts(), counts, strict=True)]
            self._held.append(self.cache.context.tables.made())
        return logits

    def _undo(self, counts: list[int]) -> None:
        self._set_counts(counts)
        self.cache.context.tables.clear()

    def _waits(self, form: Form, ops: str) -> None:
        if self.cuts_captured and any(one.due is not None for one in form):
            self.cuts_captured = False
        else:
            super()._waits(form, ops)

    # ---- what is captured: no number of the host may matter on the device -------------------------------------------

    def _step(self, form: Form) -> Tensor:
        """Logits ``[1, V]`` (float32) of the step, with its cuts before and after."""
        self._cut(form, "evict_before")
        position_T = self.seen + self.offset_T  # int32, as the offsets
        if self.tokens > 1:
            self.cache.handler.fixed = lambda layer: StaticStep(self.seen, position_T)
        else:
            # Once for all layers: the rows of every head, the new token's included.
            lengths_LBH = self.length_L[:, None, None].expand(-1, *self.flats[0].starts_BH.shape) + 1
            self.cache.handler.fixed = partial(self._static_step, position_T, lengths_LBH)
        try:
            if self.dense is not None:
                logits_NV = self.dense(self.ids, self.cache.handler)
            else:
                logits_NV = forward(self.model, self.ids, self.cache, logits_to_keep=1)[:, -1].float()
        finally:
            self.cache.handler.fixed = None
        self.seen += self.tokens
        self.length_L += self.tokens
        self._cut(form, "evict_after")
        return logits_NV

    def _static_step(self, position_T: Tensor, lengths_LBH: Tensor, layer: int) -> StaticStep:
        """Place of a layer's new token, and the rows that it sees. The device has their number."""
        flat, rows = self.flats[layer], self.cache.bounded[layer]
        starts_BH, lengths_BH = flat.starts_BH, lengths_LBH[layer]
        if rows.window is not None:
            seen_BH = lengths_BH.clamp(max=rows.window)
            starts_BH, lengths_BH = starts_BH + (lengths_BH - seen_BH), seen_BH
        seen = replace(flat, starts_BH=starts_BH, lengths_BH=lengths_BH, longest=rows.capacity)
        return StaticStep(self.seen, position_T, self.length_L[layer : layer + 1], seen)

    def _cut(self, form: Form, when: Literal["evict_before", "evict_after"]) -> None:
        """Cut the layers that must be before a step (``evict_before``), or after it (``evict_after``)."""
        cut = [one.layer for one in form if one.due is not None and getattr(one.due, when) is not None]
        ctx, layers = self.cache.context, [self.cache.bounded[layer] for layer in cut]
        if when == "evict_before":
            make_room(ctx, layers, self.tokens, self.seen)
        else:
            evict_if_due(ctx, layers, self.seen)
        for rows in layers if self.tokens == 1 else ():
            self.length_L[rows.number].fill_(rows.rows)

    # ---- the host's counts, which a replayed graph does not touch ----------------------------------------------------

    def _counts(self) -> list[int]:
        counts = [getattr(rows, name) for rows in self.cache.bounded for name in COUNTS]
        return [*counts, self.cache.counters.evicted_rows]

    def _set_counts(self, counts: list[int]) -> None:
        numbers, bounded = iter(counts), self.cache.bounded
        for rows in bounded:
            for name in COUNTS:
                setattr(rows, name, next(numbers))
        counters = self.cache.counters
        counters.evicted_rows = next(numbers)
        counters.evictions = max(self.evictions, *(rows.evictions for rows in bounded))
