"""The architectures that are checked: transformers' causal language models, and variants that configurations switch on."""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .needed import Sizes, cycled, mrope

Row = tuple[str, dict[str, Any]]
"""A model type, and values of its configuration."""
WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2", "ministral3")
MULTIMODAL = ("mistral3", "qwen3_vl", "qwen3_vl_moe", "internvl", "llava", "smolvlm", "paligemma", "cohere2_vision")
OTHERS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "blt",
    "camembert", "cpmant", "ctrl", "data2vec-text", "electra", "ernie", "gemma4_assistant", "gemma4_unified_assistant",
    "git", "got_ocr2", "marian", "mbart", "megatron-bert", "mllama", "modernbert-decoder", "moshi",
    "moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp", "openai-gpt", "pegasus", "plbart", "prophetnet",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xglm", "xlm",
    "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
}  # fmt: skip
"""Beside decoders of text in transformers' list: encoders, halves of translators, sound, drafts; and the oldest decoders."""
DECODERS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - OTHERS


def variants(s: Sizes) -> dict[str, Row]:
    """Rows beside those of transformers' list. The multimodal ones are read as text."""
    half, three = s.layers // 2, mrope(s.hidden // s.heads)
    upper = {
        "use_sliding_window": True, "max_window_layers": half,
        "layer_types": ["full_attention"] * half + ["sliding_attention"] * (s.layers - half),
    }  # fmt: skip
    return {
        **{f"{name} window": (name, {"sliding_window": s.window}) for name in WINDOWED},
        "qwen2 window": ("qwen2", upper),
        "qwen3 window": ("qwen3", upper),
        "gemma4_text shared": (
            "gemma4_text",
            {
                "num_kv_shared_layers": 2, "num_hidden_layers": 6,
                "layer_types": cycled(["sliding_attention", "full_attention"], 6),
            },
        ),
        "gemma4_text keys are values": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        "gemma4_text experts": (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": s.experts, "top_k_experts": 2, "moe_intermediate_size": 32},
        ),
        "granite multipliers": (
            "granite",
            {"residual_multiplier": 0.22, "attention_multiplier": 0.1, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
        ),
        "granitemoehybrid no positions": ("granitemoehybrid", {"position_embedding_type": None}),
        "granitemoehybrid attention": ("granitemoehybrid", {"layer_types": ["full_attention"] * s.layers}),
        "falcon 7b": (
            "falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False},
        ),
        "falcon alibi": (
            "falcon",
            {"new_decoder_architecture": False, "multi_query": False, "alibi": True, "num_kv_heads": s.heads},
        ),
        "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": s.kv_heads}),
        "gpt_bigcode heads": ("gpt_bigcode", {"multi_query": False}),
        "llama4_text chunks": ("llama4_text", {"layer_types": ["chunked_attention"] * (s.layers - 1) + ["full_attention"]}),
        "deepseek_v3 pairs": ("deepseek_v3", {"rope_interleave": True}),
        **{f"{name} few": (name, {"index_topk": 16}) for name in ("deepseek_v32", "glm_moe_dsa", "hy_v4")},
        "smollm3 rope": ("smollm3", {"no_rope_layers": [1] * s.layers}),
        "smollm3 no positions": ("smollm3", {"no_rope_layers": [1] * (s.layers - 1) + [0]}),
        "doge few": ("doge", {"keep_window_size": 32}),
        "stablelm qk norm": ("stablelm", {"qk_layernorm": True}),
        "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
        "persimmon qk norm": ("persimmon", {"qk_layernorm": True}),
        "minimax attention": ("minimax", {"layer_types": ["full_attention"] * s.layers}),
        "qwen2_vl": ("qwen2_vl", {"text_config": {"rope_parameters": three}}),
        "qwen2_5_vl": ("qwen2_5_vl", {"text_config": {"rope_parameters": three}}),
        "glm4v": ("glm4v", {"text_config": {"rope_parameters": {**three, "partial_rotary_factor": 1.0}}}),
        **{name: (name, {}) for name in MULTIMODAL},
    }  # fmt: skip


def rows(sizes: Sizes) -> dict[str, Row]:
    """Every row by name: those of transformers' list by their model types."""
    return {name: (name, {}) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | variants(sizes)
