"""The logits processor by which an engine asks for a bounded cache: it learns which requests there are, and refuses those that
cannot be.

A processor of logits is made in every worker before the model, and is told before each forward which request stands in which row
of the batch. This one changes no logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding as known
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding as LongRope
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from .attention_backend import BoundedBackend, is_bounded
from .refusals import release
from .worker import RequestInfo, State, begin


class Requests(LogitsProcessor):
    """The request of every row of the batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request: over HTTP with status 400. Raises ValueError."""
        if sampling_params.seed is not None and current_platform.is_cpu():
            raise ValueError(
                f"seed={sampling_params.seed}: vLLM {release()} on a CPU fails at seeds where a prompt is read in pieces"
            )
        own = sampling_params.extra_args or {}
        if State.server is not None:
            State.server.request(own, 1)
        elif asked := [f"{name}={own[name]!r}" for name in ("budget", "policy") if name in own]:
            raise ValueError(f"{asked[0]}: a request has settings of its own where locret-vllm started the server")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.requests = begin(vllm_config, device).requests
        self.unchecked: VllmConfig | None = vllm_config
        register_backend(AttentionBackendEnum.CPU_ATTN, "locret_kit.vllm.attention_backend.OnCpu")
        register_backend(AttentionBackendEnum.CUSTOM, "locret_kit.vllm.attention_backend.BoundedBackend")
        register_rotary()

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        if self.unchecked is not None:  # the model is built by now
            check_layers(self.unchecked)
            self.unchecked = None
        requests = self.requests
        for row in batch_update.removed:
            requests.pop(row, None)
        for row, params, prompt, _ in batch_update.added:
            requests[row] = RequestInfo(len(prompt or ()), params.extra_args or {})
        for a, b, how in batch_update.moved:
            if how == MoveDirectionality.SWAP:
                requests[a], requests[b] = requests[b], requests[a]
            else:
                requests[b] = requests.pop(a)


def check_layers(vllm_config: VllmConfig) -> None:
    """Raise RuntimeError for attention that is vLLM's own."""
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        backend = layer.get_attn_backend()
        if backend is not BoundedBackend:
            raise RuntimeError(
                f"attention of {name} is {backend.__name__}, not locret_kit's: a card needs --attention-backend CUSTOM, and a "
                "process builds one engine"
            )


# ---- rotary embeddings that leave queries and keys as they are -----------------------------------------------------


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
