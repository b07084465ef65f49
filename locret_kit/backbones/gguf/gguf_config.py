"""transformers' configuration of a model, from what a GGUF file says of it: all of that is taken, or refused by name.

The file's words are llama.cpp's (``gguf/constants.py``), and so are the defaults of what it does not say (``llama-model.cpp``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from .gguf_file import GgufFile

NEUTRAL = {
    "vocab_size": None, "rope.scaling.finetuned": None, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "attention.causal": True, "expert_count": 0,
    "expert_used_count": 0,
}  # fmt: skip
"""Fields without effect at this value; None is any."""
NO_HEAD_DIM = ("qwen2", "phi3", "smollm3")
"""Types of models whose configurations have no field for the size of a head, where it is the usual one."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>",
)  # fmt: skip
"""Tokens that end an answer whatever the fields say, as in llama.cpp: of Phi-3 they name another than a chat ends with."""
LLAMA3 = dict[str, float](low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""The scaling of all Llama 3.1, 3.2 and 3.3 but for its factor, which the file gives as factors of frequencies."""
ORIGINAL = "rope.scaling.original_context_length"
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ConfigFields = dict[str, object]
"""Fields of transformers' configuration by their names."""
CLOSE = 1e-4
"""Relative difference of numbers that are the same."""


@dataclass
class ModelFields:
    """The fields of a file under its architecture's name, and which of them were read."""

    file: GgufFile
    read: set[str] = field(default_factory=set)

    def get(self, name: str, default: object = None) -> Any:
        """A number; of an array whose numbers are alike, that one.

        Raises:
            ValueError: it is absent and has no default, or differs from layer to layer.
        """
        self.read.add(name)
        value = self.file.fields.get(f"{self.file.architecture}.{name}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) > 1:
                raise ValueError(f"{name} differs from layer to layer")
            value = value.tolist()[0]
        if value is None:
            raise ValueError(f"{name} is missing")
        return float(np.format_float_positional(np.float32(value))) if isinstance(value, float) else value

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        usual = self.get("embedding_length") // self.get("attention.head_count")
        key, value = (self.get(f"attention.{kind}_length", usual) for kind in ("key", "value"))
        if key != value:
            raise ValueError(f"attention.key_length={key} must be attention.value_length={value}")
        return key

    def check_unread(self) -> None:
        """Raise ValueError for a field that nothing has read and that may have an effect."""
        for key, value in self.file.fields.items():
            name = key.removeprefix(f"{self.file.architecture}.")
            if name == key or name in self.read:
                continue
            if name not in NEUTRAL or NEUTRAL[name] not in (None, value):
                raise ValueError(f"{name}={value!r} is not known of {self.file.architecture}")


def config_of(file: GgufFile, name: str) -> PreTrainedConfig:
    """The configuration, which calls itself ``name``. Its field ``gguf`` says the name of the file's types, and their sizes.

    Raises:
        ValueError: an architecture that is not mapped, or a field or scaling that cannot be restored; it is named.
    """
    if file.architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture={file.architecture!r} of a GGUF file is not mapped; there are: {', '.join(ARCHITECTURES)}. Give the "
            "model's own folder or Hub id"
        )
    fields = ModelFields(file)
    values = {**_common(fields), **ARCHITECTURES[file.architecture](fields)}
    fields.check_unread()
    model_type = str(values.pop("model_type"))
    usual = fields.get("embedding_length") // fields.get("attention.head_count")
    if model_type in NO_HEAD_DIM and fields.head_dim == usual:
        del values["head_dim"]  # as in the model's own configuration
    config = AutoConfig.for_model(model_type, **values)
    config._name_or_path = name
    config.gguf = {"types": file.precision, "packed_bytes": file.packed_bytes, "plain_numbers": file.plain_numbers}
    return config


def _common(fields: ModelFields) -> ConfigFields:
    tensors, everything = fields.file.tensors, fields.file.fields
    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing")
    heads = fields.get("attention.head_count")
    ids = {name: everything.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", *ENDS, "padding_token_id")}
    by_text = [i for i, token in enumerate(fields.file.tokens) if token in END_TOKENS]
    ends = list(dict.fromkeys([*(ids[name] for name in ENDS if ids[name] is not None), *by_text]))
    return dict(
        model_type=fields.file.architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=fields.get("embedding_length"),
        intermediate_size=fields.get("feed_forward_length"),
        num_hidden_layers=fields.get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fields.get("attention.head_count_kv", heads),
        rms_norm_eps=fields.get("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=fields.get("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=ids["padding_token_id"],
        head_dim=fields.head_dim,
    )


# ---- rotation ----------------------------------------------------------------------------------------------------------


def _rope(fields: ModelFields, *, partial: bool = False) -> ConfigFields:
    """``rope_parameters``."""
    size = fields.head_dim
    rotated = fields.get("rope.dimension_count", size)
    if rotated != size and not partial:
        raise ValueError(f"rope.dimension_count={rotated} must be the size of a head, {size}")
    rope = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 10000.0)} | _scaling(fields, rotated)
    if rotated != size:
        rope["partial_rotary_factor"] = rotated / size
    return {"rope_parameters": rope}


def _scaling(fields: ModelFields, rotated: int) -> ConfigFields:
    kind, tensors = fields.get("rope.scaling.type", "none"), fields.file.tensors
    factor, stretch = fields.get("rope.scaling.factor", 1.0), fields.get("rope.scaling.attn_factor", 1.0)
    original = fields.get(ORIGINAL, fields.get("context_length"))
    by_tensors = {FACTORS, LONG, SHORT} & tensors.keys()
    if kind == "linear" and factor == 1.0:
        kind = "none"
    if by_tensors == {LONG, SHORT} and kind in ("none", "longrope"):
        return _longrope(fields, original, stretch)
    if stretch == 1.0 and by_tensors == {FACTORS} and kind == "none":
        return _llama3(fields.file.tensor(FACTORS).float(), fields.get("rope.freq_base", 10000.0), rotated)
    if stretch == 1.0 and not by_tensors:
        match kind:
            case "none":
                return {}
            case "linear":
                return {"rope_type": "linear", "factor": factor}
            case "yarn":
                return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(
        f"rope.scaling.type={kind!r} with factor {factor}, attn_factor {stretch} and tensors {sorted(by_tensors)} cannot be "
        "restored"
    )


def _llama3(factors: Tensor, theta: float, rotated: int) -> ConfigFields:
    """The scaling of which the frequencies' factors are."""
    factor = round(float(factors.max()), 4)
    lengths = 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    low, high, whole = LLAMA3.values()
    share = ((whole / lengths - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - share) / factor + share)
    if factors.shape != wanted.shape or not torch.allclose(factors.double(), wanted, rtol=CLOSE):
        raise ValueError(f"{FACTORS}: factors of frequencies that are not Llama 3's cannot be restored")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _longrope(fields: ModelFields, original: int, stretch: float) -> ConfigFields:
    long, short = (fields.file.tensor(name).float() for name in (LONG, SHORT))
    rope: ConfigFields = dict(
        rope_type="longrope",
        long_factor=[round(x, 6) for x in long.tolist()],
        short_factor=[round(x, 6) for x in short.tolist()],
        original_max_position_embeddings=original,
    )
    scale = fields.get("context_length") / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return rope if math.isclose(stretch, usual, rel_tol=CLOSE) else {**rope, "attention_factor": stretch}


# ---- architectures -----------------------------------------------------------------------------------------------------


def _biases(fields: ModelFields) -> ConfigFields:
    names = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return {field: name in fields.file.tensors for field, name in names.items()}


def _llama(fields: ModelFields) -> ConfigFields:
    """Llama and what computes as it does: of Mistral's models the name alone tells them."""
    words = " ".join(str(fields.file.fields.get(f"general.{key}", "")) for key in ("basename", "name")).lower()
    if "mistral" in words or "ministral" in words:
        return {"model_type": "mistral", "sliding_window": None, **_rope(fields)}
    return {**_biases(fields), **_rope(fields)}


def _qwen3(fields: ModelFields) -> ConfigFields:
    return {"attention_bias": _biases(fields)["attention_bias"], **_rope(fields)}


def _smollm3(fields: ModelFields) -> ConfigFields:
    return {**_biases(fields), **_rope(fields)}  # every fourth layer has no rotation, here as in llama.cpp


def _phi3(fields: ModelFields) -> ConfigFields:
    return {
        "sliding_window": fields.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": fields.get(ORIGINAL, fields.get("context_length")),
        **_rope(fields, partial=True),
    }


def _gemma3(fields: ModelFields) -> ConfigFields:
    layers, hidden, heads = (fields.get(name) for name in ("block_count", "embedding_length", "attention.head_count"))
    pattern = fields.get("attention.sliding_window_pattern", 6)
    if type(pattern) is not int:
        raise ValueError(f"attention.sliding_window_pattern={pattern!r} must be one number")
    sliding = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 10000.0)}
    capped = fields.get("final_logit_softcapping", 0.0)
    return {
        "model_type": "gemma3_text",
        "sliding_window": fields.get("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {"full_attention": _rope(fields)["rope_parameters"], "sliding_attention": sliding},
        "query_pre_attn_scalar": hidden // heads
        if layers == 62
        else fields.head_dim,  # 62 layers: Gemma 3 27B, as in llama.cpp
        "final_logit_softcapping": capped or None,
    }


ARCHITECTURES: dict[str, Callable[[ModelFields], ConfigFields]] = {
    "llama": _llama, "qwen2": _rope, "qwen3": _qwen3, "phi3": _phi3, "gemma3": _gemma3, "smollm3": _smollm3,
}  # fmt: skip
"""Architecture, as llama.cpp calls it -> its own fields."""
