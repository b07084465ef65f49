"""GGUF files of tiny random models, written by the ``gguf`` package as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tiny_models import LONGROPE, tiny_model
from tiny_tokenizer import tiny_tokenizer
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = dict(
    vocab_size=len(tiny_tokenizer()), hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=6,
    eos_token_id=1,
)  # fmt: skip
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma3_text": "gemma3",
    "smollm3": "smollm3", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2",
}  # fmt: skip
FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps", "shortconv_l_cache": "conv_L_cache", "sliding_window": "sliding_window",
    "rope_scaling_orig_ctx_len": "original_max_position_embeddings", "ssm_conv_kernel": "linear_conv_kernel_dim",
    "ssm_state_size": "linear_key_head_dim", "ssm_group_count": "linear_num_key_heads",
    "ssm_time_step_rank": "linear_num_value_heads", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
"""Fields of files, and those of configurations."""
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", dict(rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192})),
    "linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "yarn": ("qwen2", dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128)
    )),
    "longrope": ("phi3", {**LONGROPE, "rope_parameters": {
        **LONGROPE["rope_parameters"], "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }}),
}  # fmt: skip
"""Scaling -> a family that has it, and its settings."""


def tiny_source(family: str, **changes: Any) -> Any:
    """A random model whose norms and biases are no ones and zeros."""
    if family == "smollm3":
        family, changes = "llama", {"model_type": "smollm3", **changes}
    if family in ("qwen3", "gemma3"):
        changes = {"head_dim": 32, **changes}
    if family == "gemma3":
        changes["query_pre_attn_scalar"] = 32  # as in all of that family but the largest
    model = tiny_model(family, **{**SIZES, **changes})
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn_like(weight) / 4)
        else:
            weight.div_(3.0)
    return model


def newer_source(arch: str) -> Any:
    """A random model of an architecture that transformers reads, with two value heads for each key head in states."""
    kind = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "lfm2": "lfm2"}[arch]
    more: dict[str, Any] = dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)
    if arch != "lfm2":
        more = {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
        more |= dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4)
    if arch == "qwen35moe":
        more |= dict(moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    sizes = dict(num_hidden_layers=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes}, **more)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) / (4 if weight.dim() == 1 else 8))
    return model


def write_gguf(path: Path, model: Any, form: str, tokenizer: Any = None, **split: Any) -> Path:
    """Convert a model, whose matrices become what the file's are. ``split``: how ``GGUFWriter`` makes parts of it."""
    config, kind = model.config, GGMLQuantizationType[form]
    arch = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, arch, **split)
    _add_fields(writer, config, arch)
    _add_tokenizer(writer, tokenizer or tiny_tokenizer(), config.vocab_size)
    _add_rotation(writer, config)
    numbers = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, leaf = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "")
        to = names.get_name(stem) or name.replace("model.layers", "blk").replace("linear_attn.dt_bias", "ssm_dt.bias")
        to += f".{leaf}" if leaf else ".weight" if ".experts." in name else ""
        plain = weight.dim() == 1 or "conv" in stem.split(".")[-1]
        if not plain:
            across = name.endswith("linear_attn.out_proj.weight")  # its columns are moved, and with them the blocks
            data = _laid(name, weight, config, arch) if across else weight.numpy()
            rounded = torch.from_numpy(quants.dequantize(quants.quantize(data, kind), kind))
            weight.copy_(torch.from_numpy(_laid(name, rounded, config, arch)) if across else rounded)
        halves = zip(("gate", "up"), weight.chunk(2, 1), strict=True) if "gate_up_exps" in to else [("", weight)]
        for half, part in halves:
            data, form_of = _laid(name, part, config, arch), GGMLQuantizationType.F32 if plain else kind
            packed = data if plain else quants.quantize(data, kind)
            writer.add_tensor(to.replace("gate_up", half) if half else to, packed, raw_dtype=form_of)
    return _written(writer, path)


def _laid(name: str, weight: torch.Tensor, config: Any, arch: str) -> np.ndarray:
    """A tensor as the converter lays it out."""
    data = weight.float().numpy()
    if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        # as LlamaModel.permute
        return data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    if arch == "gemma3" and data.ndim == 1:
        return data + 1
    if not arch.startswith("qwen35"):
        return data.squeeze()

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:
        """Value heads with those of one key head apart."""
        return rows.reshape(2, 2, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("norm.weight") and "linear_attn" not in name:
        return data + 1
    if name.endswith("A_log"):
        return tiled(-np.exp(data), 1)
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tiled(data, 1)
    if name.endswith("in_proj_z.weight"):
        return tiled(data, 16)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([data[:64], tiled(data[64:], 16)]).squeeze()
    if name.endswith("linear_attn.out_proj.weight"):
        return np.ascontiguousarray(tiled(data.T, 16).T)
    return data.squeeze()


def _written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_fields(writer: GGUFWriter, config: Any, arch: str) -> None:
    fields = {name: getattr(config, own, None) for name, own in FIELDS.items()}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields |= dict(name=f"Tiny {config.model_type}", key_length=size, file_type=gguf.LlamaFileType.MOSTLY_Q8_0)
    if arch == "lfm2":
        fields["layer_norm_rms_eps"] = config.norm_eps
        fields["head_count_kv"] = [2 if kind == "full_attention" else 0 for kind in config.layer_types]
    elif arch.startswith("qwen35"):
        fields |= dict(full_attention_interval=4, rope_dimension_sections=[2, 1, 1, 0], rope_dimension_count=8)
        fields["ssm_inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    else:
        fields["value_length"] = size
        if arch != "gemma3":
            fields |= dict(rope_dimension_count=size, vocab_size=config.vocab_size)
        if arch == "phi3":
            fields["sliding_window"] = config.sliding_window or 0
    for name, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def _add_rotation(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "linear":  # the kind that a file means which names none
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "llama3":
            plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
            factors = plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
            writer.add_tensor("rope_freqs.weight", factors.numpy())
        case "longrope":  # as Phi3MiniModel.generate_extra_tensors
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            factor = np.sqrt(1 + np.log(scale) / np.log(config.original_max_position_embeddings))
            writer.add_rope_scaling_attn_factors(float(factor))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any, size: int) -> None:
    words = dict(sorted((i, word) for word, i in tokenizer.get_vocab().items()))
    tokens = [words.get(i, f"[PAD{i}]") for i in range(size)]
    special = set(tokenizer.all_special_tokens)
    kinds = [
        TokenType.CONTROL if t in special else TokenType.UNUSED if i not in words else TokenType.NORMAL
        for i, t in enumerate(tokens)
    ]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    _add_vocabulary(
        writer, "gpt2", "gpt-2", tokens, kinds, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        token_merges=[" ".join(pair) for pair in merges], add_bos_token=False, chat_template=tokenizer.chat_template,
    )  # fmt: skip


def write_sentencepiece(path: Path, architecture: str) -> Path:
    """A file that holds a small vocabulary of SentencePiece, and of a model nothing that could run."""
    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "<end>": TokenType.CONTROL}
    kinds |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    merged = ["th", "he", "▁t", "▁th", "▁the", "the", "er", "at", "ea", "\n\n", "▁▁"]
    # An extended vocabulary: its merges are made in another order than that of their ids.
    tokens = [*kinds, *reversed(merged), *"▁\n", *"abcdefghijklmnopqrstuvwxyz"]
    scores = [-float(merged.index(token)) if token in merged else -100.0 for token in tokens]
    return _write_vocabulary(
        path, architecture, "llama", "default", tokens, kinds, (1, 2), token_scores=scores, unk_token_id=0
    )


def write_byte_level(path: Path, pre: str, ends: tuple[str, str]) -> Path:
    """The same of a byte-level vocabulary, whose last tokens begin and end a text; nothing says whether they are added."""
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "th", "the", *ends]
    first, last = len(tokens) - 2, len(tokens) - 1
    kinds = dict.fromkeys(ends, TokenType.CONTROL)
    return _write_vocabulary(path, "qwen2", "gpt2", pre, tokens, kinds, (first, last), token_merges=["t h", "th e"])


def _write_vocabulary(
    path: Path, architecture: str, model: str, pre: str, tokens: list[str], kinds: dict[str, TokenType], ends: tuple[int, int],
    **more: Any,
) -> Path:  # fmt: skip
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    kinds_of = [kinds.get(token, TokenType.NORMAL) for token in tokens]
    _add_vocabulary(writer, model, pre, tokens, kinds_of, bos_token_id=ends[0], eos_token_id=ends[1], **more)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(4, np.float32))
    return _written(writer, path)


def _add_vocabulary(writer: GGUFWriter, model: str, pre: str, tokens: list[str], kinds: list, **more: Any) -> None:
    for name, value in dict(
        tokenizer_model=model, tokenizer_pre=pre, token_list=tokens, token_types=kinds, **more
    ).items():
        getattr(writer, f"add_{name}")(value)
