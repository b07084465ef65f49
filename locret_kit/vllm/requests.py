"""The logits processor by which an engine asks for a bounded cache.

vLLM makes one in every worker before the model, and passes it each change of the batch's rows. It tracks the requests of the
batch, refuses those that a bounded cache cannot run, and changes no logits.
"""

from dataclasses import fields

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ..naming import check_name
from .attention_backend import BoundedBackend
from .measure import register_rotary, watch_modules
from .refusals import release
from .server_settings import OWN, VllmSettings
from .worker import RequestInfo, State, begin


class Requests(LogitsProcessor):
    """The request of every row of the batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request: over HTTP with status 400. Raises ValueError."""
        if (seed := sampling_params.seed) is not None and current_platform.is_cpu():
            raise ValueError(f"seed={seed}: vLLM {release()} on a CPU fails at seeds where a prompt is read in pieces")
        own = sampling_params.extra_args or {}
        for name in own if State.alone else ():
            check_name("vllm_xargs", name, OWN)
        if State.server is not None:
            State.server.request(own, 1)
        elif asked := [f"{name}={own[name]!r}" for name in (one.name for one in fields(VllmSettings)) if name in own]:
            raise ValueError(f"{asked[0]}: a request has settings of its own where locret-vllm started the server")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.requests = begin(vllm_config, device).requests
        self.unchecked: VllmConfig | None = vllm_config
        watch_modules()
        register_backend(AttentionBackendEnum.CPU_ATTN, "locret_kit.vllm.attention_backend.OnCpu")
        register_backend(AttentionBackendEnum.CUSTOM, "locret_kit.vllm.attention_backend.BoundedBackend")
        register_rotary()

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """The logits [B, V], unchanged."""
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
        if backend is not BoundedBackend and not isinstance(layer, MambaBase):  # whose state vLLM keeps
            said = f"attention of {name} is {backend.__name__}, not locret_kit's"
            raise RuntimeError(f"{said}: a card needs --attention-backend CUSTOM, and a process builds one engine")
