"""What vLLM's front end says and checks: the entry point of ``vllm.stat_logger_plugins``, which alone is told the configuration in the
process that takes requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from .plugin import asked
from .state import server_of


class Front(StatLoggerBase):
    """Lets requests be checked where they arrive. It counts nothing."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        if asked(vllm_config):
            server_of(vllm_config)

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass
