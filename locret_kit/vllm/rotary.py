"""Rotary embeddings that leave queries and keys as they are: the cache rotates them by the place that it gives a row."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding as known
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding as LongRope

from .attention_backend import is_bounded

KINDS = (
    known.RotaryEmbedding, known.Llama3RotaryEmbedding, known.LinearScalingRotaryEmbedding,
    known.DynamicNTKScalingRotaryEmbedding, known.DynamicNTKAlphaRotaryEmbedding, known.YaRNScalingRotaryEmbedding,
)  # fmt: skip
"""Kinds whose frequencies the kit reads from the same configuration."""


class Unrotated:
    """The forward of a rotary embedding, for engines that ask for a bounded cache."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.unrotated = is_bounded()
        if self.unrotated:  # a table of every position that there may be, which nobody reads
            self.register_buffer("cos_sin_cache", torch.empty(0, dtype=torch.float32), persistent=False)  # type: ignore[attr-defined]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        if self.unrotated:
            return query, key
        return super().forward(positions, query, key, *args, **kwargs)  # type: ignore[misc]


def register_rotary() -> None:
    """Let vLLM make embeddings of these kinds."""
    for kind in KINDS:
        if kind.__name__ not in op_registry_oot:
            CustomOp.register_oot(type(f"Unrotated{kind.__name__}", (Unrotated, kind), {}), name=kind.__name__)
    if not hasattr(LongRope, "unrotated"):
        _register_long_rope()


def _register_long_rope() -> None:
    """LongRoPE is no custom operation, so its class itself is told."""
    begin, turn = LongRope.__init__, LongRope.forward

    def init(self: LongRope, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)
        self.unrotated = is_bounded()

    def forward(
        self: LongRope, positions: Tensor, query: Tensor, key: Tensor | None = None, *rest: object
    ) -> tuple[Tensor, Tensor | None]:
        return (query, key) if self.unrotated else turn(self, positions, query, key, *rest)

    LongRope.unrotated, LongRope.__init__, LongRope.forward = False, init, forward
