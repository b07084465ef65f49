"""What does not go with a bounded cache in vLLM, each in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS = {
    "LlamaForCausalLM": "Llama 2 and 3, SmolLM2, TinyLlama, Yi",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen 2 and 2.5",
    "Qwen3ForCausalLM": "Qwen 3",
    "Phi3ForCausalLM": "Phi-3",
    "Gemma3ForCausalLM": "Gemma 3",
}
"""Architectures whose tokens were compared with the kit's own."""


DOCUMENTS = "Documents"
"""vLLM's connector that reads documents."""


def refuse(facts: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of vLLM's settings that does not go with a bounded cache.

    Args:
        facts: vLLM's own names and their values; a name that is absent is not asked.
    """

    def at(name: str, plain: object = None) -> Any:
        return facts.get(name, plain)

    if at("speculative_config"):
        raise ValueError(
            "speculative_config: rejected drafts may have evicted slots, so leave speculative decoding out"
        )
    if at("enable_prefix_caching"):
        raise ValueError(
            "enable_prefix_caching: a page holds what is left of a text, no prefix: leave it out, and read documents once"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if at(name, 1) > 1:
            raise ValueError(f"{name}={at(name)} must be 1: a text's rows are chosen among all of them, on one rank")
    if at("pipeline_parallel_size", 1) > 1:
        raise ValueError(
            f"pipeline_parallel_size={at('pipeline_parallel_size')} must be 1: on CPUs vLLM's own fails, and no card was at hand"
        )
    if at("kv_cache_dtype", "auto") not in ("auto", "bfloat16", "float16"):
        raise ValueError(
            f"kv_cache_dtype={at('kv_cache_dtype')} must be auto: pages hold keys and values in the model's type"
        )
    if at("enable_lora"):
        raise ValueError("enable_lora: it was not tried with a bounded cache: merge the adapter into the weights")
    if at("enable_prompt_embeds"):
        raise ValueError(
            "enable_prompt_embeds: the length of a prompt is known by its tokens alone: send tokens or text"
        )
    if at("connector", DOCUMENTS) != DOCUMENTS:
        raise ValueError(
            f"kv_connector={at('connector')} must be {DOCUMENTS}: a page is of use to the same model and settings alone"
        )
    if at("documents") and not at("connector"):
        raise ValueError(f"documents={at('documents')} needs vLLM's connector {DOCUMENTS}, which locret-vllm sets")
    if at("runner", "auto") not in ("auto", "generate"):
        raise ValueError(f"runner={at('runner')} must be generate: nothing is evicted from what is read once")
    for name in at("architectures", ()):
        if name not in MODELS:
            raise ValueError(
                f"architecture {name} was not tried with a bounded cache in vLLM; there are: {', '.join(MODELS)}"
            )


def refuse_engine(vllm_config: Any, documents: str | None) -> None:
    """``refuse`` an engine by its configuration, and by the folder of documents that it is asked to read."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    refuse(
        {
            "speculative_config": vllm_config.speculative_config,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "decode_context_parallel_size": parallel.decode_context_parallel_size,
            "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "kv_cache_dtype": cache.cache_dtype,
            "enable_lora": vllm_config.lora_config,
            "enable_prompt_embeds": model.enable_prompt_embeds,
            **(
                {}
                if vllm_config.kv_transfer_config is None
                else {"connector": vllm_config.kv_transfer_config.kv_connector}
            ),
            "documents": documents,
            "runner": model.runner_type,
            "architectures": [model.architecture],
        }
    )
