"""What vLLM says of its requests, and where it refuses them: the entry point of ``vllm.logits_processors``.

A processor of logits is told before each forward which request stands in which row of the batch. This one changes no logits. It
is made in every worker, and vLLM takes none that fails: so here a plugin that did not load is an error, and so is what does not
go with a bounded cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from .attention_backend import BoundedImpl
from .choice import asked
from .plugin import registered
from .refusals import refuse_engine
from .versions import check_version, release
from .worker import Told
from .worker_state import engine_of, server_here, server_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate


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
        self.told: dict[int, Told] | None = None
        if not asked(vllm_config):
            return
        check_version()
        if not registered():
            raise RuntimeError(
                "locret_kit's plugin did not load, so vLLM would use full attention: it is an entry point of "
                "vllm.general_plugins; VLLM_PLUGINS, if it is set, must name locret"
            )
        refuse_engine(vllm_config, server_of(vllm_config).served.documents)
        self.told = engine_of(vllm_config).rows
        self.told.clear()
        self.layers = vllm_config.compilation_config.static_forward_context
        self.checked = False

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        told = self.told
        if told is None or batch_update is None:
            return
        if not self.checked:  # the model is built by now
            check_layers(self.layers)
            self.checked = True
        for index in batch_update.removed:
            told.pop(index, None)
        for index, params, prompt, _ in batch_update.added:
            told[index] = Told(len(prompt or ()), params.extra_args or {})
        for a, b, how in batch_update.moved:
            if how == MoveDirectionality.SWAP:
                told[a], told[b] = told[b], told[a]
            else:
                told[b] = told.pop(a)


def check_layers(layers: Mapping[str, object]) -> None:
    """Raise RuntimeError for attention that is vLLM's own."""
    for name, layer in layers.items():
        kind = type(getattr(layer, "impl", None))
        if kind is not BoundedImpl:
            raise RuntimeError(
                f"attention of {name} is {kind.__name__}, not locret_kit's: a card needs --attention-backend CUSTOM, and a "
                "process builds one engine"
            )
