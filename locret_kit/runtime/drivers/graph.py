"""Steps of one text of fixed shapes: their kernels, sizes and addresses never change, so that a CUDA graph can replay them.

A step appends one token, or a chunk of a prompt, to every layer and attends to its rows. Where in the text its tokens stand is a
number on the device. So is the number of rows before a single token: rows are written at an index, and attention masks by
length. Once the cache is full, every chunk sees the same number of rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...backbones.weight_bits import weight_bits_of
from ...cache.bounded import BoundedCache
from ...cache.step import StaticStep
from ...policies.capabilities import reason
from .capture import WARM, StepGraphs
from .dense import dense_step

CHUNKS = 6
"""Fewest chunks left of a prompt for a capture. The third chunk that leaves a full cache is captured."""
MOST_GRAPHS = 4
"""Captured forms of a chunk; a form beyond them runs without a graph."""


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


Form = tuple[tuple[int, int], ...]
"""Rows of each layer before a chunk, and its tokens since the last eviction (0 with a window); of a token nothing."""


class GraphDriver(StepGraphs[Form]):
    """``driver([cache], [token])`` gives the logits ``[1, V]`` after a token of its one text, as the dynamic forward does; with
    ``tokens`` above 1 ``driver([cache], ids)`` those after a chunk ``[tokens]`` of its prompt.

    Args:
        model: attached, and bound to the cache.
        cache: after its prompt, or after a chunk. Before it ``refusal`` may be asked, and no token comes.
    """

    shares = False

    def __init__(self, model: PreTrainedModel, cache: BoundedCache, tokens: int = 1) -> None:
        super().__init__(model, WARM if tokens == 1 else 2, MOST_GRAPHS)
        self.cache, self.tokens, self.reason = cache, tokens, _reason_against(model, cache)
        self.what = f"a {'token' if tokens == 1 else 'chunk'} of policy={cache.policy.name!r}"
        if tokens > 1 and cache.context.stages:
            self.reason = f"policy={cache.policy.name!r} does more with a chunk than attend and evict"
        if self.reason is not None or not cache.get_seq_length():
            return
        if tokens == 1:
            self.dense = dense_step(model, cache.context)
        with torch.inference_mode(False):
            self.numbers = torch.zeros(tokens + 1 + len(cache.bounded), dtype=torch.int64, device=model.device)
            self.host = np.zeros(len(self.numbers), np.int64)
            self.offset_T = torch.arange(tokens, dtype=torch.int32, device=model.device)
            self.flats = [rows.varlen() for rows in cache.bounded] if tokens == 1 else []
            # Tokens, the number of those before them, and before a single token the rows of each layer.
            self.ids, self.seen, self.length_L = (
                self.numbers[None, :tokens], self.numbers[tokens], self.numbers[tokens + 1 :]
            )  # fmt: skip

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next step can come here: any token, and a chunk after which every layer without a window is cut."""
        T, dues = self.tokens, ((rows, cache.context.due(rows, self.tokens)) for rows in cache.bounded)
        steady = T == 1 or all(due.tokens == T and (due.evict_after or rows.window) is not None for rows, due in dues)
        return steady and self.reason is None

    def _write(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> Form:
        (cache,) = caches
        if isinstance(tokens, Tensor):  # on the device already: the host does not wait for it
            self.ids[0] = tokens
            self.seen.fill_(cache.get_seq_length())
            return tuple((rows.rows, rows.since_eviction if rows.window is None else 0) for rows in cache.bounded)
        self.host[:] = [*tokens, cache.get_seq_length(), *cache.kept_rows]
        self.numbers.copy_(torch.from_numpy(self.host))
        return ()

    def _step(self, form: Form, caches: Sequence[BoundedCache]) -> Tensor:
        position_T = self.seen + self.offset_T  # int32, as the offsets
        if self.tokens > 1:
            self.cache.handler.fixed = lambda layer: StaticStep(self.seen, position_T)
        else:
            # Once for all layers: the rows of every head, the new token's included.
            lengths_LBH = self.length_L[:, None, None].expand(-1, *self.flats[0].starts_BH.shape) + 1
            self.cache.handler.fixed = partial(self._static_step, position_T, lengths_LBH)
        try:
            if self.dense is not None:
                return self.dense(self.ids, self.cache.handler)
            return forward(self.model, self.ids, self.cache, logits_to_keep=1)[:, -1].float()
        finally:
            self.cache.handler.fixed = None

    def _static_step(self, position_T: Tensor, lengths_LBH: Tensor, layer: int) -> StaticStep:
        """Place of a layer's new token, and the rows that it sees. The device has their number."""
        flat, rows = self.flats[layer], self.cache.bounded[layer]
        starts_BH, lengths_BH = flat.starts_BH, lengths_LBH[layer]
        if rows.window is not None:
            seen_BH = lengths_BH.clamp(max=rows.window)
            starts_BH, lengths_BH = starts_BH + (lengths_BH - seen_BH), seen_BH
        seen = replace(flat, starts_BH=starts_BH, lengths_BH=lengths_BH, longest=rows.capacity)
        return StaticStep(self.seen, position_T, self.length_L[layer : layer + 1], seen)
