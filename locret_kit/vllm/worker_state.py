"""The worker of this process: made when vLLM builds its model, read by everything that vLLM makes for it.

vLLM hands its configuration to some of them, and to none what another one made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..backbones.load import load_config
from . import SECTION
from .ranks import Ranks
from .server_settings import ServerSettings, VllmSettings
from .worker import Worker

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig


class State:
    """One for a process."""

    worker: Worker | None = None
    server: ServerSettings | None = None
    section: object = None
    """The section of the configuration of which both were made."""


def server_of(vllm_config: VllmConfig) -> ServerSettings:
    """Settings of an engine's server."""
    section = vllm_config.additional_config[SECTION]
    if State.server is None or State.section is not section:
        State.server, State.section, State.worker = ServerSettings(VllmSettings.read(section)), section, None
    return State.server


def server_here() -> ServerSettings | None:
    """Settings of the server whose engine is in this process; None where there is none."""
    return State.server


def worker_of(vllm_config: VllmConfig) -> Worker:
    """The texts of this worker."""
    server = server_of(vllm_config)
    if State.worker is None:
        from vllm.platforms import current_platform

        model = vllm_config.model_config
        device = (
            torch.device("cpu")
            if current_platform.is_cpu()
            else torch.device(current_platform.device_type, torch.cuda.current_device())
        )
        State.worker = Worker(server, config_of(model), model.dtype, device, _ranks())
    return State.worker


def worker_here() -> Worker:
    """The texts of this worker, where vLLM tells no configuration. Raises RuntimeError where there is none."""
    if State.worker is None:
        raise RuntimeError("vLLM asks for a page before it has built a model: please report this")
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
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_reduce,
    )

    return Ranks(
        get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), tensor_model_parallel_all_reduce
    )
