"""Values that no rule can guess, by ``model_type``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tiny model."""

    hidden: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 256
    """More than tokens of a test's text, whose tokens all differ: no two slots score alike."""
    window: int = 24
    chunk: int = 32
    """Of layers whose attention is chunked."""
    context: int = 512
    experts: int = 4


def mrope(channels: int) -> dict[str, Any]:
    """RoPE of three axes, which text walks alike, for heads of so many channels."""
    axis = 3 * channels // 16
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [channels // 2 - 2 * axis, axis, axis]}


def cycled(kinds: Sequence[str], layers: int) -> list[str]:
    """``layers`` layer types that hold every kind, in the order in which they first come."""
    different = list(dict.fromkeys(kinds))
    return [different[i % len(different)] for i in range(layers)]


def needed(s: Sizes) -> dict[str, dict[str, Any]]:
    """Fields and values of the architectures that need some."""

    def kinds(*names: str, layers: int = s.layers) -> list[str]:
        return cycled(names, layers)

    no_window = ("mistral", "mixtral", "phi3", "phimoe", "ministral3", "starcoder2", "phi4_multimodal")
    wider = {
        "head_dim": 24, "kv_lora_rank": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    return {
        # published without a window, or with one beyond their context
        **{name: {"sliding_window": None} for name in no_window},
        "bamba": {"attn_layer_indices": [1, 3]},
        "cohere_compass_text": {"rope_parameters": {"full_attention": mrope(s.head_dim)}},
        "dbrx": {
            "attn_config": {"kv_n_heads": s.kv_heads, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": s.hidden, "ffn_hidden_size": 32, "moe_num_experts": s.experts, "moe_top_k": 2},
        },
        "deepseek_v4": {"num_key_value_heads": 1},
        "dots3_note_text": {"per_layer_config": dict.fromkeys(range(1, s.layers, 2), wider)},
        "gemma3n_text": {
            "num_hidden_layers": 6, "num_kv_shared_layers": 2, "altup_num_inputs": 2,
            "layer_types": kinds("sliding_attention", "full_attention", layers=6),
        },
        "gemma4_text": {"global_head_dim": 2 * s.head_dim},
        "gemma4_unified_text": {"global_head_dim": 2 * s.head_dim},
        "gpt_neo": {"attention_types": [[["global", "local"], s.layers // 2]]},
        "granitemoehybrid": {"layer_types": kinds("linear_attention", "full_attention"), "position_embedding_type": "rope"},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "lfm2": {"layer_types": kinds("conv", "full_attention")},
        "lfm2_moe": {"layer_types": kinds("conv", "full_attention")},
        "longcat_flash": {"num_layers": s.layers // 2, "head_dim": s.head_dim // 2},
        "mamba2": {"num_heads": s.hidden // 8, "head_dim": 16},
        "mllama": {"text_config": {"cross_attention_layers": [1]}},
        "qwen4_exp_text": {
            "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": s.head_dim, "indexer_budget": 64, "hc_lowrank": 8,
            "indexer_compress_ratio": 4, "hc_count": 2, "split_ngram_parts": 1, "ngram_vocab_size_base": 64, "heads_per_ngram": 2,
        },
        "reformer": {
            "attn_layers": ["local"] * 2, "axial_pos_embds": False, "num_hidden_layers": 2, "local_attn_chunk_length": 32,
        },
        "xlm": {"n_layers": 2, "causal": True, "asm": False},
        "xlstm": {"num_heads": s.heads, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
        "zamba": {
            "attention_hidden_size": 2 * s.hidden, "attention_head_dim": 2 * s.hidden // s.heads, "num_key_value_heads": s.heads,
            "num_hidden_layers": 6, "layers_block_type": kinds("linear_attention", "hybrid", layers=6),
        },
        "zaya": {"num_experts_per_tok": 1, "sliding_window": None},
    }  # fmt: skip
