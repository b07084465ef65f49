"""The plugin of ``vllm.stat_logger_plugins``, which alone is told the configuration in the process that takes requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

from .choice import is_bounded
from .request_pages import SPARE
from .worker_state import server_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ReadyLine(StatLoggerBase):
    """Lets requests be checked where they arrive. It counts nothing."""

    pages: int | None = None
    """vLLM's blocks of the engine that started last."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.cache_config = vllm_config.cache_config
        if is_bounded(vllm_config):
            server_of(vllm_config)

    def record(self, *args: object, **kwargs: object) -> None:
        pass

    def log_engine_initialized(self) -> None:
        ReadyLine.pages = self.cache_config.num_gpu_blocks


def requests_that_fit() -> int:
    """Requests that run at once. Raises RuntimeError before the engine runs."""
    if ReadyLine.pages is None:
        raise RuntimeError("vLLM answers, and has told nobody how many pages there are: please report this")
    return ReadyLine.pages - SPARE
