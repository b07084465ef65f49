"""The plugin of ``vllm.logits_processors``: it learns which requests there are, and refuses those that cannot be.

A processor of logits is told before each forward which request stands in which row of the batch. This one changes no logits. It
is made in every worker, and vLLM takes none that fails: so here a plugin that did not load is an error, and so is what does not
go with a bounded cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from .attention_backend import BoundedBackend
from .choice import is_bounded
from .plugin import check_version, is_registered, release
from .refusals import refuse_engine
from .worker import RequestInfo
from .worker_state import server_here, server_of, worker_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class Requests(LogitsProcessor):
    """The request of every row of the batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request: over HTTP with status 400. Raises ValueError."""
        server = server_here()
        if server is None:
            return
        from vllm.platforms import current_platform

        if sampling_params.seed is not None and current_platform.is_cpu():
            raise ValueError(
                f"seed={sampling_params.seed}: vLLM {release()} on a CPU fails at seeds where a prompt is read in pieces"
            )
        server.request(sampling_params.extra_args or {}, 1)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, RequestInfo] | None = None
        if not is_bounded(vllm_config):
            return
        check_version()
        if not is_registered():
            raise RuntimeError(
                "locret_kit's plugin did not load, so vLLM would use full attention: it is an entry point of "
                "vllm.general_plugins; VLLM_PLUGINS, if it is set, must name locret"
            )
        refuse_engine(vllm_config, server_of(vllm_config).section.documents)
        self.requests = worker_of(vllm_config).requests
        self.requests.clear()
        self.unchecked: VllmConfig | None = vllm_config

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        requests = self.requests
        if requests is None or batch_update is None:
            return
        if self.unchecked is not None:  # the model is built by now
            check_layers(self.unchecked)
            self.unchecked = None
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
