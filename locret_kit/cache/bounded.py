"""Face of the bounded cache to transformers: a ``Cache`` that never holds more than ``budget + chunk`` rows per head.

The model may be fed in pieces of any size: evictions happen at boundaries that the prompt and ``chunk`` fix (see
``geometry.schedule``), so ``model.generate`` with any ``prefill_chunk_size`` and the kit's own prefill agree exactly (but for
``clipped`` positions, which follow the newest token of a piece).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backbones.handler import Arguments, Handler, LayerOperations, Softmax
from .arguments import checked_arguments
from .layer_attention import Fixed, attend_again
from .step import evict_if_due, read_block, read_tokens
from .text_cache import TextCache
from .view import score_by_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BoundedCache(TextCache, Handler):
    """A key/value cache of fixed size for ``model.generate`` and for the kit's own prefill.

    Args:
        settings: a ``RunSettings``, or its budget: slots that a key/value head of a full-attention layer keeps after an
            eviction, everything counted; the mean over layers and heads where the policy's allocation tells them apart.
        policy: a name or an expression of the policy grammar, or a ``Policy``; by default what ``heads`` were published
            with, or locret.
        heads: retaining heads, or their folder, file or Hub repository, for policies that score by predicted importance;
            the first forward moves them to the model's device and dtype. What they were published with stands in for
            settings that are not given.
        prompt_length: tokens of the prompt. When given, the last ``local_len`` of them are never evicted before
            decoding, and the eviction before them protects no stabilizers (Locret, algorithm 1). When not, every
            boundary is treated as one in the middle of the prompt.
        stages: your own, after those of the policy; forks share them.
        **given: fields of ``RunSettings`` by name, where ``settings`` is none.

    Attributes:
        terms: what was asked for, whatever the prompt and the model.
        settings: resolved for this prompt; positions and backend too once a model is bound.
        context: constants of the bound cache.
        counters: work done on this text.
        pins: ranges of positions of the text whose tokens are never evicted, ascending; see `pin`.
        reread_positions: positions in the prompt of the tokens that are read in its place, the tail's included; empty
            where the prompt is read once, or not yet for the second time.

    Raises:
        ValueError: a setting out of range; names the setting, its value and the bound. FileNotFoundError: no such heads.
    """

    fixed: Callable[[int], Fixed] | None = None
    """The place of a layer's token while it is decoded with fixed shapes (see ``runtime.graph_decoder``)."""

    @property
    def wants_unrotated(self) -> bool:  # type: ignore[override]
        """Whether q and k come before RoPE."""
        return self.context.ropes is not None

    def begin(self, model: PreTrainedModel, arguments: Arguments) -> Arguments:
        self.bind(model)
        if (
            self.policy.needs_logits and "logits_to_keep" in arguments
        ):  # Gemma 4 leaves other tokens out of its last layers
            arguments = {**arguments, "logits_to_keep": 0}
        return checked_arguments(arguments, self.get_seq_length(), in_pieces=self.context.description.in_pieces)

    def operations(self, x: Tensor) -> LayerOperations | None:
        return self.context.backend.operations(x)

    @torch.no_grad()
    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of the newest tokens over a layer's rows, their own included."""
        rows = self.bounded[layer]
        rows.softmax = softmax
        return attend_again(self.context, layer, rows, q_BQTD)

    @torch.no_grad()
    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, scores: Tensor | None = None
    ) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of new tokens; stores them and evicts where the schedule says.

        Args:
            scores: their entry scores ``[B, H, T]``, where they are known already.

        Raises:
            ValueError: several texts.
        """
        if len(q_BQTD) != 1:
            raise ValueError(f"batch={len(q_BQTD)} must be 1: a BoundedCache takes one text, a BatchCache several")
        rows, ctx = self.bounded[layer], self.context
        rows.softmax = softmax
        if self.fixed is not None:  # evictions and counts are then the graph decoder's
            return read_block(ctx, layer, rows, q_BQTD, k_BHTD, v_BHTD, self.fixed(layer))
        rows.update(k_BHTD, v_BHTD)
        if layer == 0:
            ctx.tables.clear()  # layers of one forward share tables
            ctx.votes.clear()
            if self.needs_reread and rows.seen >= (self.schedule.prompt_length or 0):
                raise RuntimeError(
                    f"policy={self.policy.name!r} reads the end of the prompt twice, which locret_kit's own prefill does and "
                    "model.generate does not: use locret_kit.runtime.session.generate"
                )
        # Not undone by an exception: a cache that stopped between two layers must not be read on.
        self.unfinished = True
        out = read_tokens(ctx, layer, rows, q_BQTD, k_BHTD, v_BHTD, scores)
        self.unfinished = layer + 1 < len(self.layers) or self.in_blocks
        return out

    @property
    def in_blocks(self) -> bool:  # type: ignore[override]
        """Whether ``read`` must be called after every forward, and no forward may cross a boundary."""
        return self._context is not None and self._context.evicts_after_forward

    def blocks(self, tokens: int) -> list[int]:
        """Lengths of the blocks in which the next ``tokens`` tokens go."""
        return list(self.schedule.blocks(self.get_seq_length(), tokens))

    @torch.no_grad()
    def read(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Score the block that was just read by its tokens' final hidden states where the policy does, then evict where that is
        due."""
        ctx, began = self.context, time.perf_counter()
        if self.policy.needs_logits:
            self.last_hidden = score_by_logits(ctx, self.bounded, hidden_BTE, ids_BT, self.last_hidden)
        ctx.counters.score_s += time.perf_counter() - began
        # Only now: in a forward, later layers read rows that earlier ones have written.
        for layer, rows in enumerate(self.bounded):
            evict_if_due(ctx, layer, rows)
        self.unfinished = False
