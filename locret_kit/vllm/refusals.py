"""Releases and settings of vLLM that do not go with a bounded cache, each refused in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..naming import first_line, install_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOG = logging.getLogger("locret_kit")
VERSIONS = ("0.32.0",)
"""Tested releases of vLLM. Another release is accepted if it has every interface that the kit uses."""


def release() -> str:
    """Installed release of vLLM, without a build suffix.

    Raises:
        ImportError: vLLM is not installed. RuntimeError: its import fails.
    """
    try:
        import vllm
    except ImportError:
        raise
    except Exception as error:
        raise RuntimeError(f"vllm cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    return str(getattr(vllm, "__version__", "unknown")).partition("+")[0]


def check_version() -> None:
    """Raise RuntimeError if the installed vLLM lacks an interface that the kit uses. Warn about an untested release."""
    if (found := release()) in VERSIONS:
        return
    from .interfaces import missing

    tested = " or ".join(VERSIONS)
    if (first := next(missing(), None)) is not None:
        raise RuntimeError(f"vllm=={found}: {first}, which locret_kit uses: take {tested}: {install_line('vllm')}")
    has = "it has what locret_kit uses of vllm, which was tested with"
    LOG.warning("warning: vllm==%s: not tested; %s %s", found, has, tested)


DOCUMENTS = "Documents"
"""vLLM's connector that reads documents."""
LEFT_OUT = {
    "speculative_config": "rejected drafts may have evicted slots",
    "enable_prefix_caching": "a page holds what is left of a text, no prefix; read documents once instead",
    "enable_lora": "it was not tried with a bounded cache; merge the adapter into the weights",
    "enable_prompt_embeds": "the length of a prompt is known by its tokens alone; send tokens or text",
    "enable_sleep_mode": "it was not tried with a bounded cache",
    "headless": "locret-vllm starts one server; several are in docs/howto/scale.md",
}
"""Settings that must not be given, and why."""
ROWS = "a text's rows are chosen among all of them, on one rank"
SERVERS = "start several servers instead, see docs/howto/scale.md"
CHOICES: dict[str, tuple[tuple[object, ...], str]] = {
    "decode_context_parallel_size": ((1,), ROWS),
    "prefill_context_parallel_size": ((1,), ROWS),
    "pipeline_parallel_size": ((1,), "on CPUs vLLM's own pipelines fail, and no card was at hand"),
    "api_server_count": ((1,), SERVERS),
    "nnodes": ((1,), "a layer split over several machines was not tried"),
    "kv_cache_dtype": (("auto", "bfloat16", "float16"), "pages hold keys and values in the model's type"),
    "kv_connector": ((DOCUMENTS,), "a page is of use to the same model and settings alone"),
    "runner": (("auto", "generate"), "nothing is evicted from what is read once"),
}
"""Values that a setting may have, and why no others."""


def refuse(facts: Mapping[str, object]) -> None:
    """Raise ValueError for the first of vLLM's settings that does not go with a bounded cache.

    Args:
        facts: vLLM's own names and their values; a name that is absent is not asked.
    """
    for name, why in LEFT_OUT.items():
        if facts.get(name):
            raise ValueError(f"{name} must be left out: {why}")
    for name, (values, why) in CHOICES.items():
        if facts.get(name) not in (None, *values):
            raise ValueError(f"{name}={facts[name]} must be {' or '.join(map(str, values))}: {why}")
    documents = facts.get("documents")
    if documents and facts.get("is_hybrid"):
        raise ValueError(
            f"documents={documents} must be left out: layers of this model hold a state, which no page has"
        )
    if documents and not facts.get("kv_connector"):
        raise ValueError(f"documents={documents} needs vLLM's connector {DOCUMENTS}, which locret-vllm sets")


def refuse_engine(vllm_config: VllmConfig, documents: str | None) -> None:
    """``refuse`` an engine by its configuration, and by the folder of documents that it is asked to read."""
    model, cache, transfer = vllm_config.model_config, vllm_config.cache_config, vllm_config.kv_transfer_config
    refuse(
        {
            **vllm_config.parallel_config.__dict__,
            "speculative_config": vllm_config.speculative_config,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "enable_lora": vllm_config.lora_config,
            "enable_prompt_embeds": model.enable_prompt_embeds,
            "enable_sleep_mode": model.enable_sleep_mode,
            "kv_cache_dtype": cache.cache_dtype,
            "kv_connector": transfer and transfer.kv_connector,
            "documents": documents,
            "runner": model.runner_type,
            "is_hybrid": model.is_hybrid,
        }
    )
