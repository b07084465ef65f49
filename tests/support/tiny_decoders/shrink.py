"""A tiny configuration of any architecture, by rules about the names of fields.

No rule names an architecture; ``needed.py`` holds the values that none can guess. A field that no rule
knows is made small where its name ends in a unit of width, so that architectures of other releases shrink too.
"""

import re
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .needed import Sizes, cycled, needed

USUAL = Sizes()
PART = Sizes(hidden=32, layers=2, heads=2, kv_heads=2)
"""Of an image's or a sound's encoder, which no test calls."""


def rules(s: Sizes) -> list[tuple[str, object]]:
    """Pairs of a pattern of whole names and the value of such a field; the first that matches counts."""
    inner, narrow = 3 * s.hidden // 2, s.hidden // 2
    key, rope = s.head_dim, s.head_dim // 2
    return [
        (r"vocab_size|vocab_size_per_layer_input|n_words", s.vocab),
        (r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_\w+_positions|context_length", s.context),
        (r"sliding_window(_size)?|(attention_)?window_size|local_attention", s.window),
        (r"(conf_)?attention_chunk_size", s.chunk),
        # widths of the stream and of MLPs
        (r"(attention_)?hidden_size|n_embd|d_model|dim|hidden_dim|word_embed_proj_dim|embedding_size|lru_width", s.hidden),
        (r"emb_dim", s.hidden),
        (r"(dense_)?intermediate_size(_mlp)?|n_inner|(\w+_)?ffn_dim|d_ff|dim_ff|dff|d_inner", inner),
        (r"(\w+_)?intermediate_size|(\w*_)?ffn_hidden_size|feed_forward_size", narrow),
        (r"hidden_size_per_layer_input|(moe_)?router_hidden_size", 16),
        # heads
        (r"(\w+_)?(kv|key_value)_heads|multi_query_group_num|kv_n_heads", s.kv_heads),
        (r"index_head_dim", key),
        (r"linear_num_key_heads", 2),
        (r"linear_num(_value)?_heads|index_n_heads", 4),
        (r"mamba_n(um)?_heads", 8),
        (r"n_mamba_heads", 2),
        (r"(\w+_)?(attention_|n_|num_)?heads|n_head", s.heads),
        (r"qk_rope_head_dim", rope),
        (r"qk_head_dim", key + rope),
        (r"global_head_dim", 2 * key),
        (r"mamba_(d_)?head(_dim)?", 16),
        (r"(\w+_)?head_dim|attention_head_size|dim_head|kv_channels", key),
        (r"rotary_dim", rope),
        # layers
        (r"num_global_layers|depth|num_blocks|conf_num_hidden_layers", 2),
        (r"num_(hidden_|decoder_|encoder_)?layers|n_layers?|(en|de)coder_layers", s.layers),
        (r"num_nextn_predict_layers|(num_)?mtp(_num_hidden)?_layers|num_mtp_layers", 0),
        (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
        (r"moe_layer_end_index", -1),
        # experts
        (r"num_(local_|global_)?experts|n_routed_experts|moe_num_experts", s.experts),
        (r"(moe_)?num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|zero_expert_num", 2),
        (r"(moe_)?n(um)?_shared_experts|n_group|topk_group|num_expert_group", 1),
        # latent attention, states, images
        (r"[qkvo]+_lora_rank", 32),
        (r"index_topk", s.context),
        (r"mamba_d_ssm", 2 * s.hidden),
        (r"(mamba_)?expand|mlp_expansion_factor", 2),
        (r"(mamba_d_|ssm_)?state(_size)?|mamba_d_state", 16),
        (r"\w*_rank", 8),
        (r"(mamba_)?chunk_size|block_size", 32),
        (r"mamba_n_?groups|n_groups", 1),
        (r"image_size|crop_size", 28),
        (r"patch_size", 14),
        (r"(num_)?position_embedding(s|_size)", 64),
    ]  # fmt: skip


OUTWARD = r"out_hidden_size|vision_output_dim|projector_(in|out)put_dim|output_proj_dims|adapter_out_dim"
"""Widths in which an encoder meets the text part."""
WIDTH = r"\w*(size|dim|dims|rank|channels?|width)"
"""Names of other fields that are made small where they are large."""
PLAIN = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False, "is_decoder": True,
    "add_cross_attention": False, "is_encoder_decoder": False, "rotary_pct": 0.5,
}  # fmt: skip
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


def tiny_config(model_type: str, sizes: Sizes, changes: dict[str, Any] | None = None) -> Any:
    """A configuration of ``sizes`` with ``changes`` over it; those under ``text_config`` are the text part's."""
    return _shrunk(CONFIG_MAPPING[model_type], sizes, changes or {})


def _shrunk(cls: Any, sizes: Sizes, changes: dict[str, Any]) -> Any:
    """A configuration of class ``cls``; its parts are shrunk likewise."""
    changes = needed(sizes).get(cls.model_type, {}) | changes
    of_text, names = changes.pop("text_config", {}), {field.name for field in fields(cls)}
    values = {field.name: value for field in fields(cls) if (value := _value(field, sizes)) is not None}
    values |= {name: value for name, value in PLAIN.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention expands a key and a value for each query head
        values["num_key_value_heads"] = sizes.heads
    values |= changes
    for name in sorted(names & {*KINDS, *cls.sub_configs} - {*changes}):
        default = getattr(_default(cls), name, None)
        if name in KINDS and isinstance(default, list | tuple) and default:
            values[name] = cycled(default, _layers(values, sizes))
        elif name == "text_config" and default is not None:
            values[name] = _shrunk(type(default), sizes, of_text).to_dict()
        elif name in cls.sub_configs and default is not None:
            values[name] = _part(default, sizes)
    return cls(**values)


@cache
def _default(cls: Any) -> Any:
    """A configuration as it is published; None where it cannot be made without arguments."""
    try:
        return cls()
    except Exception:
        return None


def _value(field: Any, sizes: Sizes) -> object:
    """The small value of a field; None leaves it as it is."""
    default = field.default
    if isinstance(default, bool | str | float):
        return None
    known = next((value for pattern, value in rules(sizes) if re.fullmatch(pattern, field.name)), None)
    if default is None and known in (sizes.window, sizes.chunk) and re.search("window|chunk", field.name):
        return None  # this architecture has none
    if known is None and isinstance(default, int) and default > 64 and re.fullmatch(WIDTH, field.name):
        return 32
    return known


def _layers(values: dict[str, Any], sizes: Sizes) -> int:
    """Layers of a configuration that says how many; some count the types of their layers."""
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
    return next((values[name] for name in names if name in values), sizes.layers)


def _part(config: Any, sizes: Sizes) -> dict[str, Any]:
    """The configuration of an encoder that no test calls, as a dictionary."""
    values = config if isinstance(config, dict) else config.to_dict()
    small = {field.name: _value(field, PART) for field in fields(type(config))} if not isinstance(config, dict) else {}
    values = {**values, **{name: value for name, value in small.items() if value is not None}}
    values |= {name: sizes.hidden for name in values if re.fullmatch(OUTWARD, name)}
    values.pop("per_layer_config", None)
    if values.get("layer_types"):
        values["layer_types"] = list(values["layer_types"])[: PART.layers]
    for name in ("fullatt_block_indexes", "deepstack_visual_indexes", "intermediate_layers_indices"):
        if name in values:
            values[name] = [0]
    return values


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """Weights with which greedy tokens vary and attention matters. Norms and biases leave 1 and 0, so that the order of
    operations shows; what keeps a state's recurrence stable is left alone."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or re.search(r"A_log|dt_|x_proj|conv1d|ssm|\.D$", name):
            continue
        noise = torch.randn(weight.shape, generator=draw)
        if weight.dim() >= 2 and min(weight.shape[-2:]) > 1:
            inputs = weight.shape[-1] if weight.dim() == 2 else max(weight.shape[-2:])
            weight.copy_(noise * (0.5 if re.search("embed|wte|wpe", name) else 1.1 / inputs**0.5))
        else:
            weight.add_(0.1 * noise)


def tiny_decoder(model_type: str, changes: dict[str, Any] | None = None, sizes: Sizes = USUAL, seed: int = 0) -> Any:
    """A random model in float32. Raises whatever building it raises."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, sizes, changes)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    if hasattr(model, "set_default_language"):
        model.set_default_language(config.languages[0])
    randomize(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, do_sample=False)
    return model
