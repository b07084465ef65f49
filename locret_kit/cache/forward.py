"""Forward of one text: attention of its new tokens over its rows.

The model may be fed in pieces of any size: evictions happen at boundaries that the prompt and ``chunk`` fix (see
``due``). So ``model.generate`` with any ``prefill_chunk_size`` and the kit's own prefill agree exactly. There are three
exceptions: ``clipped`` positions follow the newest token of a piece, rows in 4 or 2 bits are rounded after a piece, and recall
and sparse prefill choose for a piece.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..backbones.handlers import Arguments, Handler, LayerInput, LayerOperations, Softmax
from . import step
from .options import checked_arguments
from .state import TextState
from .view import folded_scores


class TextForward(Handler):
    """Receiver of the attention calls of a text's forwards.

    Attributes:
        fixed: the place of a layer's token while it is decoded with fixed shapes (see ``runtime.drivers.graph``).
    """

    def __init__(self, state: TextState) -> None:
        self.state = state
        self.fixed: Callable[[int], step.StaticStep] | None = None

    @property
    def wants_unrotated(self) -> bool:  # type: ignore[override]
        """Whether q and k come before RoPE."""
        return self.state.context.ropes is not None

    def begin(self, model: PreTrainedModel, arguments: Arguments) -> Arguments:
        state = self.state
        state.bind(model)
        ctx = state.context
        if ctx.policy.score.needs_logits and "logits_to_keep" in arguments:
            arguments = {**arguments, "logits_to_keep": 0}  # Gemma 4 leaves other tokens out of its last layers
        return checked_arguments(arguments, ctx, state.seen, state.layers[0].rows if state.layers else 0)

    def operations(self, x: Tensor) -> LayerOperations | None:
        return self.state.context.backend.operations(x)

    @torch.no_grad()
    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of the newest tokens over a layer's rows, their own included."""
        rows = self.state.layers[layer]
        rows.softmax = softmax
        return step.attend_again(self.state.context, rows, q_BQTD)

    @torch.no_grad()
    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, x: LayerInput = None
    ) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of new tokens; stores them and evicts where the schedule says.

        Raises:
            ValueError: several texts.
        """
        if len(q_BQTD) != 1:
            raise ValueError(f"batch={len(q_BQTD)} must be 1: a BoundedCache takes one text, a BatchCache several")
        state, ctx = self.state, self.state.context
        score = folded_scores(ctx, layer, x, q_BQTD.shape[2])
        if self.fixed is not None:  # evictions and counts are then the graph decoder's
            state.layers[layer].softmax = softmax
            return step.read_block(ctx, state.layers[layer], q_BQTD, k_BHTD, v_BHTD, self.fixed(layer), score)
        q_BQTD, k_BHTD, v_BHTD = step.in_model_type(ctx, q_BQTD, k_BHTD, v_BHTD)
        rows = state.open(layer, softmax, k_BHTD, v_BHTD)
        if layer == 0:
            state.make_room(q_BQTD.shape[2])
        out = step.read_tokens(ctx, rows, q_BQTD, k_BHTD, v_BHTD, score, state.waiting)
        state.close(layer)
        return out

    @property
    def in_blocks(self) -> bool:  # type: ignore[override]
        """Whether ``read`` must be called after every forward, and no forward may cross a boundary."""
        return self.state.context.evicts_after_forward

    def blocks(self, tokens: int) -> list[int]:
        return list(self.state.schedule.blocks(self.state.seen, tokens))

    @torch.no_grad()
    def read(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        self.state.read(hidden_BTE, ids_BT)

    @torch.no_grad()
    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Run the evictions that wait for the forward's end, and check that every layer has seen its tokens.

        Raises:
            ValueError: a layer has not.
        """
        state = self.state
        seen = {rows.seen for rows in state.layers}
        if len(seen) == 1:
            state.evict_waiting()
        # A backbone that computes some attention by itself leaves a layer behind.
        if state.unfinished or len(seen) > 1:
            raise ValueError(
                f"layers have seen {min(seen)} to {max(seen)} tokens of this text: some attention did not reach the cache"
            )
