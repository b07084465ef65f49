"""The engine of this process: made when vLLM builds its model, read by everything that vLLM makes for it.

vLLM hands its configuration to some of them, and to none what another one made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..backbones.load import load_config
from . import SECTION
from .ranks import Ranks
from .server_settings import Served, ServerSettings
from .worker import Worker

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig


class State:
    """One for a process."""

    engine: Worker | None = None
    server: ServerSettings | None = None
    section: object = None
    """The section of the configuration of which both were made."""


def server_of(vllm_config: VllmConfig) -> ServerSettings:
    """What an engine serves."""
    section = vllm_config.additional_config[SECTION]
    if State.server is None or State.section is not section:
        State.server, State.section, State.engine = ServerSettings(Served.read(section)), section, None
    return State.server


def server_here() -> ServerSettings | None:
    """What the engine of this process serves; None where there is none."""
    return State.server


def engine_of(vllm_config: VllmConfig) -> Worker:
    """The texts of this worker."""
    server = server_of(vllm_config)
    if State.engine is None:
        from vllm.platforms import current_platform

        model = vllm_config.model_config
        device = (
            torch.device("cpu")
            if current_platform.is_cpu()
            else torch.device(current_platform.device_type, torch.cuda.current_device())
        )
        State.engine = Worker(server, config_of(model), model.dtype, device, _ranks())
    return State.engine


def engine_here() -> Worker:
    """The texts of this worker, where vLLM tells no configuration. Raises RuntimeError where there is none."""
    if State.engine is None:
        raise RuntimeError("vLLM asks for a page before it has built a model: please report this")
    return State.engine


def config_of(model_config: ModelConfig) -> PretrainedConfig:
    """The configuration of the language model as its files say: vLLM may have been told of longer texts.

    Raises:
        ValueError: vLLM was told otherwise of more than the longest text.
    """
    told = model_config.hf_overrides
    if not isinstance(told, dict) or told.keys() - {"max_position_embeddings"}:
        raise ValueError(
            f"hf_overrides={told}: a bounded cache reads the model's own configuration, but for max_position_embeddings"
        )
    return load_config(model_config.model, model_config.revision)


def _ranks() -> Ranks:
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_reduce,
    )

    return Ranks(
        get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), tensor_model_parallel_all_reduce
    )
