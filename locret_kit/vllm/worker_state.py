"""The worker of this process: made with vLLM's logits processors, read by everything that vLLM makes for its model.

vLLM hands its configuration to some of them, and to none what another one made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..backbones.load import load_config
from ..backbones.patches import lacks_bfloat16
from .ranks import Ranks
from .refusals import refuse_engine
from .server_settings import ServerSettings, VllmSettings
from .worker import Worker

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig

LOG = logging.getLogger("locret_kit")
SECTION = "locret"
"""Name of the kit's settings in vLLM's ``--additional-config``."""
PROCESSOR = "locret_kit.vllm:Requests"
"""The logits processor by which an engine asks for a bounded cache."""


class State:
    """One for a process."""

    worker: Worker | None = None
    server: ServerSettings | None = None
    """Settings by which requests are checked."""
    section: object = None
    """The section of the configuration of which the worker was made."""


def engine_options(
    server: ServerSettings, config: Mapping[str, object] | None = None, processors: Sequence[object] | None = None
) -> dict[str, object]:
    """Options of an engine, as ``LLM(model, **engine_options(server))``, whose requests are checked in this process. ``config``
    and ``processors`` are what it is told beside them."""
    State.server = server
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
    section = section_of(vllm_config)
    if not isinstance(section, dict):
        raise ValueError(
            f"additional_config must hold the settings of {PROCESSOR}: {{{SECTION!r}: {{'budget': 4096}}}}"
        )
    return ServerSettings(VllmSettings.read(section))


def begin(vllm_config: VllmConfig, device: torch.device) -> Worker:
    """Make the worker of this process. Raises ValueError: an engine that does not go with a bounded cache."""
    server, model = server_of(vllm_config), vllm_config.model_config
    refuse_engine(vllm_config, server.section.documents)
    if device.type == "cpu" and model.dtype == torch.bfloat16 and lacks_bfloat16():
        LOG.warning("warning: dtype=bfloat16: this processor widens each number of it: --dtype float32 is faster")
    State.server, State.section = server, section_of(vllm_config)
    State.worker = Worker(server, config_of(model), model.dtype, device, _ranks())
    return State.worker


def worker_here() -> Worker:
    """The texts of this worker, which vLLM's parts are not told. Raises RuntimeError where there is none."""
    if State.worker is None:
        raise RuntimeError(f"a bounded cache in vLLM needs --logits-processors {PROCESSOR}")
    return State.worker


def config_of(model_config: ModelConfig) -> PretrainedConfig:
    """The configuration of the language model as its files say: vLLM may have been told of longer texts.

    Raises:
        ValueError: vLLM was told otherwise of more than the longest text.
    """
    overrides = model_config.hf_overrides
    if not isinstance(overrides, dict) or overrides.keys() - {"max_position_embeddings"}:
        raise ValueError(
            f"hf_overrides={overrides}: a bounded cache reads the model's own configuration, but for max_position_embeddings"
        )
    return load_config(model_config.model, model_config.revision)


def _ranks() -> Ranks:
    from vllm import distributed as among

    rank, size = among.get_tensor_model_parallel_rank(), among.get_tensor_model_parallel_world_size()
    return Ranks(rank, size, among.tensor_model_parallel_all_reduce)
