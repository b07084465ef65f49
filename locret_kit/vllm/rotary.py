"""Rotary embeddings of vLLM that leave queries and keys as they are, in an engine that asks for a bounded cache."""

from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding as known
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding as LongRope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from .measure import TOKENS
from .worker import State, is_bounded


class Unrotated:
    """The forward of a rotary embedding, for engines that ask for a bounded cache."""

    unrotated = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.unrotated = is_bounded()
        if self.unrotated:  # not a table of every position that there may be, which nobody reads
            table = self.cos_sin_cache[:TOKENS].clone()  # type: ignore[attr-defined, has-type]
            self.register_buffer("cos_sin_cache", table, persistent=False)  # type: ignore[attr-defined]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Rotated queries and keys, or unchanged ones for a bounded cache.

        Args:
            positions: [T]. query: [T, Q * D]. key: [T, H * D], or None for a layer that reads another's keys.
        """
        if self.unrotated:  # vLLM's definition is asked: of heads along an axis (LFM2) its call for CPUs turns others
            return self.forward_native(positions, query, key) if State.turns else (query, key)  # type: ignore[attr-defined, no-any-return]
        return super().forward(positions, query, key, *args, **kwargs)  # type: ignore[misc]


def register_rotary() -> None:
    """Let vLLM make embeddings that may leave queries and keys as they are."""
    for kind in known.__dict__.values():
        if isinstance(kind, type) and issubclass(kind, RotaryEmbeddingBase) and kind.__name__ not in op_registry_oot:
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
        """Rotated queries [T, Q * D] and keys [T, H * D], or unchanged ones for a bounded cache."""
        as_it_is = self.unrotated and not State.turns
        return (query, key) if as_it_is else turn(self, positions, query, key, *rest)

    LongRope.unrotated, LongRope.__init__, LongRope.forward = False, init, forward
