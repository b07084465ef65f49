"""State that vLLM's parts share in a process: a worker's pages and requests, and the settings that check requests.

vLLM makes its parts by name and passes them no object of ours. A preempted request starts again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine import BoundedCache
from ..validation import build
from .pages import EnginePages, Ranks
from .refusals import refuse_engine
from .server_settings import ServerSettings, VllmSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


NOBODY = 0
"""vLLM's block that belongs to no request: of padding, and of runs that warm it up."""


@dataclass
class RequestInfo:
    """A request's prompt length (tokens) and its own settings."""

    prompt_length: int
    own: Mapping[str, object]


@dataclass
class Worker:
    """A vLLM server's settings and requests, over one worker's memory."""

    server: ServerSettings
    pages: EnginePages
    requests: dict[int, RequestInfo] = field(default_factory=dict)
    """Requests by row of vLLM's batch, see ``requests.Requests``."""
    unmeasured: VllmConfig | None = None
    """Configuration of an engine whose model is not measured yet."""

    @classmethod
    def of(cls, server: ServerSettings, model: ModelConfig, device: torch.device, ranks: Ranks | None = None) -> Worker:
        """A worker without requests. Raises ValueError: heads or settings that do not fit the model, or configuration overrides
        besides the longest text."""
        overrides, known = model.hf_overrides, "max_position_embeddings"
        if not isinstance(overrides, dict) or overrides.keys() - {known}:
            said = "a bounded cache reads the model's own configuration, but for"
            raise ValueError(f"hf_overrides={overrides}: {said} {known}")
        pages = EnginePages(
            model.model, server.settings, server.policies.values(), server.heads, dtype=model.dtype, device=device,
            ranks=ranks, revision=model.revision,
        )  # fmt: skip
        worker = cls(server, pages)
        for policy in server.policies:  # what is wrong is said here
            worker.text(RequestInfo(1, {"policy": policy}))
        return worker

    def text(self, info: RequestInfo) -> BoundedCache:
        """The cache of a request, before its first token."""
        return self.pages.bind(self.server.request(info.own, info.prompt_length, self.pages.heads))


LOG = logging.getLogger("locret_kit")
SECTION = "locret"
"""Name of the kit's settings in vLLM's ``--additional-config``."""
PROCESSOR = "locret_kit.vllm:Requests"
"""The logits processor that asks an engine for a bounded cache."""


class State:
    """Worker and settings of this process."""

    worker: Worker | None = None
    server: ServerSettings | None = None
    """Settings that check requests."""
    alone: bool = False
    """Whether no other logits processor reads ``vllm_xargs``."""
    section: object = None
    """Configuration section of the worker."""
    trace: dict[str, tuple[Tensor, Tensor]] | None = None
    """Queries and keys that attention is given by layers, in a forward that is measured now."""
    turns: bool = False
    """Whether they are rotated in it."""


def engine_options(
    server: ServerSettings, config: Mapping[str, object] | None = None, processors: Sequence[object] | None = None
) -> dict[str, object]:
    """Options of an engine that checks its requests in this process, as ``LLM(model, **engine_options(server))``. ``config`` and
    ``processors`` are the engine's other options."""
    State.server, State.alone = server, not processors
    return {
        "additional_config": {**(config or {}), SECTION: server.section.given()},
        "logits_processors": [*(processors or ()), PROCESSOR],
        "enable_prefix_caching": False,
    }


def section_of(vllm_config: VllmConfig) -> object:
    """The kit's settings in an engine's configuration."""
    config = vllm_config.additional_config
    return config.get(SECTION) if isinstance(config, dict) else None


def server_of(vllm_config: VllmConfig) -> ServerSettings:
    """Settings of an engine's server. Raises ValueError: there are none, or they do not go together."""
    if not isinstance(section := section_of(vllm_config), dict):
        example = {SECTION: {"budget": 4096}}
        raise ValueError(f"additional_config must hold the settings of {PROCESSOR}: {example}")
    return ServerSettings(build(VllmSettings, section))


def begin(vllm_config: VllmConfig, device: torch.device) -> Worker:
    """Make the worker of this process. Raises ValueError: an engine that does not go with a bounded cache."""
    from vllm import distributed as among

    server, model = server_of(vllm_config), vllm_config.model_config
    refuse_engine(vllm_config, server.section.documents)
    State.server, State.section = server, section_of(vllm_config)
    rank, size = among.get_tensor_model_parallel_rank(), among.get_tensor_model_parallel_world_size()
    ranks = Ranks(rank, size, among.tensor_model_parallel_all_reduce)
    State.worker = Worker.of(server, model, device, ranks)
    State.worker.unmeasured = vllm_config
    if model.is_hybrid:  # vLLM makes states as large as so many of our pages
        vllm_config.cache_config.block_size, State.worker.pages.mixed = 1, True
    if State.worker.pages.model.widens:
        LOG.warning("warning: dtype=bfloat16: this processor widens each number of it: --dtype float32 is faster")
    return State.worker


def worker_here() -> Worker:
    """The worker of this process. Raises RuntimeError where there is none."""
    if State.worker is None:
        raise RuntimeError(f"a bounded cache in vLLM needs --logits-processors {PROCESSOR}")
    return State.worker


def is_bounded() -> bool:
    """Whether ``Requests`` was made for the current engine."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and State.section is not None and section_of(config) is State.section
