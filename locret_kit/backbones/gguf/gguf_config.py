"""A model's transformers configuration from a GGUF file. Every field is used, or refused by name.

Field names are llama.cpp's (``gguf/constants.py``), and so are the defaults of missing fields (``llama-model.cpp``).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, __version__
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from .gguf_file import GgufFile

NEUTRAL = {
    "vocab_size": None, "rope.scaling.finetuned": None, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "attention.causal": True, "expert_count": 0,
    "expert_used_count": 0,
}  # fmt: skip
"""Fields without effect at this value; None is any."""
LAYER = re.compile(r"blk\.(\d+)\.")
NO_HEAD_DIM = ("qwen2", "phi3", "smollm3")
"""Model types without a configuration field for the head size; theirs must be the usual one."""
ENDS = ("eos", "eot", "eom")
"""Special tokens that end an answer."""
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
MAX_SIZE, MAX_HEAD_SIZE = 1 << 24, 1 << 16
"""Bounds of a model's sizes, and of the channels of a head: tables of rotation are made for those."""


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
            if len(alike := set(value.tolist())) != 1:
                raise ValueError(f"{name} differs from layer to layer")
            (value,) = alike
        if value is None:
            raise ValueError(f"{name} is missing")
        return float(np.format_float_positional(np.float32(value))) if isinstance(value, float) else value

    def size(self, name: str, default: object = None, *, min_size: int = 1, max_size: int = MAX_SIZE) -> int:
        """A whole number within bounds. Raises ValueError where it is missing, differs between layers, or is another."""
        value = self.get(name, default)
        if type(value) is not int or not min_size <= value <= max_size:
            raise ValueError(f"{name}={value!r:.60} must be a whole number from {min_size} to {max_size}")
        return value

    def real(self, name: str, default: object = None) -> float:
        """A finite number above 0. Raises ValueError where it is missing, differs between layers, or is another."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r:.60} must be a finite number above 0")
        return value

    @property
    def usual_head_dim(self) -> int:
        """Channels of a head where the heads share the embedding among them."""
        return self.size("embedding_length") // self.size("attention.head_count")

    @property
    def layers(self) -> int:
        """Number of layers that have tensors."""
        found = {match[1] for name in self.file.tensors if (match := LAYER.match(name))}
        return self.size("block_count", max_size=len(found))

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        usual = self.usual_head_dim
        key, value = (self.size(f"attention.{kind}_length", usual, max_size=MAX_HEAD_SIZE) for kind in ("key", "value"))
        if key != value:
            raise ValueError(f"attention.key_length={key} must be attention.value_length={value}")
        return key

    def check_unread(self) -> None:
        """Raise ValueError for a field that nothing has read and that may have an effect."""
        for key, value in self.file.fields.items():
            name = key.removeprefix(f"{self.file.architecture}.")
            if name == key or name in self.read:
                continue
            if name not in NEUTRAL or not (NEUTRAL[name] is None or np.all(value == NEUTRAL[name])):
                raise ValueError(f"{name}={value!r:.60} is unknown for {self.file.architecture}")


def config_of(file: GgufFile, name: str) -> PreTrainedConfig:
    """The configuration, which calls itself ``name``. Its field ``gguf`` says the name of the file's types, and their sizes.

    Raises:
        ValueError: an architecture that is not mapped, or a field or scaling that cannot be restored; it is named.
    """
    if file.architecture not in ARCHITECTURES:
        return _by_transformers(file, name)
    fields = ModelFields(file)
    values = {**_common(fields), **ARCHITECTURES[file.architecture](fields)}
    fields.check_unread()
    model_type = str(values.pop("model_type"))
    if model_type in NO_HEAD_DIM and fields.head_dim == fields.usual_head_dim:
        del values["head_dim"]  # as in the model's own configuration
    config = AutoConfig.for_model(model_type, **values)
    config._name_or_path = name
    config.gguf = {"types": file.precision, "packed_bytes": file.packed_bytes, "plain_numbers": file.plain_numbers}
    return config


def _by_transformers(file: GgufFile, name: str) -> PreTrainedConfig:
    """The configuration that transformers reads. Its older reader is not asked: it leaves out fields that it does not know."""
    if file.architecture not in GGUF_CONFIG_ARCHS:
        raise ValueError(
            f"architecture={file.architecture!r:.60} of a GGUF file is not mapped; there are: {', '.join(ARCHITECTURES)}; by "
            f"transformers {__version__}: {', '.join(GGUF_CONFIG_ARCHS)}. Give the model's own folder or Hub id"
        )
    if len({tensor.path for tensor in file.tensors.values()}) > 1:
        raise ValueError(f"architecture={file.architecture!r} in parts: join them first (llama-gguf-split --merge)")
    config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name).get_text_config(decoder=True)
    config._name_or_path, config.eos_token_id = name, _ends(file)
    return config


def _ends(file: GgufFile) -> int | list[int] | None:
    """Tokens that end an answer."""
    by_text = [i for i, token in enumerate(file.tokens) if token in END_TOKENS]
    ends = list(dict.fromkeys([*(i for i in map(file.token_id, ENDS) if i is not None), *by_text]))
    return ends[0] if len(ends) == 1 else ends or None


def _common(fields: ModelFields) -> ConfigFields:
    tensors, ids, hidden = fields.file.tensors, fields.file.token_id, fields.size("embedding_length")
    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing")
    if (shape := tensors["token_embd.weight"].shape)[1:] != (hidden,):
        raise ValueError(f"token_embd.weight is {shape}, expected rows of embedding_length={hidden}")
    heads = fields.size("attention.head_count")
    return dict(
        model_type=fields.file.architecture,
        vocab_size=shape[0],
        hidden_size=hidden,
        intermediate_size=fields.size("feed_forward_length"),
        num_hidden_layers=fields.layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.size("attention.head_count_kv", heads),
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=fields.size("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=ids("bos"),
        eos_token_id=_ends(fields.file),
        pad_token_id=ids("padding"),
        head_dim=fields.head_dim,
    )


def _rope(fields: ModelFields, *, partial: bool = False) -> ConfigFields:
    """``rope_parameters``."""
    size = fields.head_dim
    rotated = fields.size("rope.dimension_count", size, max_size=size)
    if rotated != size and not partial:
        raise ValueError(f"rope.dimension_count={rotated} must be the size of a head, {size}")
    rope = {"rope_type": "default", "rope_theta": fields.real("rope.freq_base", 10000.0)} | _scaling(fields, rotated)
    if rotated != size:
        rope["partial_rotary_factor"] = rotated / size
    return {"rope_parameters": rope}


def _scaling(fields: ModelFields, rotated: int) -> ConfigFields:
    kind, tensors = fields.get("rope.scaling.type", "linear"), fields.file.tensors
    factor, stretch = fields.real("rope.scaling.factor", 1.0), fields.real("rope.scaling.attn_factor", 1.0)
    original = fields.size(ORIGINAL, fields.size("context_length"), min_size=2)
    by_tensors = {FACTORS, LONG, SHORT} & tensors.keys()
    if kind == "linear" and factor == 1.0:
        kind = "none"
    if by_tensors == {LONG, SHORT} and kind in ("none", "longrope"):
        return _longrope(fields, original, stretch, rotated)
    if stretch == 1.0 and by_tensors == {FACTORS} and kind == "none":
        return _llama3(fields.file.tensor(FACTORS).float(), fields.real("rope.freq_base", 10000.0), rotated)
    if stretch == 1.0 and not by_tensors:
        match kind:
            case "none":
                return {}
            case "linear":
                return {"rope_type": "linear", "factor": factor}
            case "yarn":
                return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(
        f"rope.scaling.type={kind!r:.60} with factor {factor}, attn_factor {stretch} and tensors {sorted(by_tensors)} cannot be "
        "restored"
    )


def _llama3(factors: Tensor, theta: float, rotated: int) -> ConfigFields:
    """Llama 3's RoPE scaling, recovered from its frequency factors, of shape ``[rotated / 2]``."""
    _check_factors(FACTORS, factors, rotated)
    factor = round(float(factors.max()), 4)
    lengths = 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated)
    low, high, whole = LLAMA3.values()
    share = ((whole / lengths - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - share) / factor + share)
    if not torch.allclose(factors.double(), wanted, rtol=CLOSE):
        raise ValueError(f"{FACTORS}: factors of frequencies that are not Llama 3's cannot be restored")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _longrope(fields: ModelFields, original: int, stretch: float, rotated: int) -> ConfigFields:
    long, short = (fields.file.tensor(name).float() for name in (LONG, SHORT))
    for name, factors in ((LONG, long), (SHORT, short)):
        _check_factors(name, factors, rotated)
    rope: ConfigFields = dict(
        rope_type="longrope",
        long_factor=[round(x, 6) for x in long.tolist()],
        short_factor=[round(x, 6) for x in short.tolist()],
        original_max_position_embeddings=original,
    )
    scale = fields.size("context_length") / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return rope if math.isclose(stretch, usual, rel_tol=CLOSE) else {**rope, "attention_factor": stretch}


def _check_factors(name: str, factors: Tensor, rotated: int) -> None:
    """Raise ValueError unless the factors, of shape ``[rotated / 2]``, are finite and above 0, one per frequency."""
    if factors.shape != (rotated // 2,) or not bool((factors > 0).all() and factors.isfinite().all()):
        raise ValueError(f"{name} {tuple(factors.shape)} must be {rotated // 2} finite numbers above 0")


def _biases(fields: ModelFields) -> ConfigFields:
    names = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return {field: name in fields.file.tensors for field, name in names.items()}


def _llama(fields: ModelFields) -> ConfigFields:
    """Llama and what computes as it does: of Mistral's models the name alone tells them. Every fourth layer of SmolLM3 has no
    rotation, in transformers as in llama.cpp."""
    words = " ".join(str(fields.file.fields.get(f"general.{key}", "")) for key in ("basename", "name")).lower()
    if "mistral" in words or "ministral" in words:
        return {"model_type": "mistral", "sliding_window": None, **_rope(fields)}
    return {**_biases(fields), **_rope(fields)}


def _qwen3(fields: ModelFields) -> ConfigFields:
    return {"attention_bias": _biases(fields)["attention_bias"], **_rope(fields)}


def _phi3(fields: ModelFields) -> ConfigFields:
    return {
        "sliding_window": fields.size("attention.sliding_window", 0, min_size=0) or None,
        "original_max_position_embeddings": fields.size(ORIGINAL, fields.size("context_length")),
        **_rope(fields, partial=True),
    }


def _gemma3(fields: ModelFields) -> ConfigFields:
    layers, pattern = fields.layers, fields.size("attention.sliding_window_pattern", 6)
    sliding = {"rope_type": "default", "rope_theta": fields.real("rope.freq_base_swa", 10000.0)}
    capped = fields.get("final_logit_softcapping", 0.0) and fields.real("final_logit_softcapping")
    return {
        "model_type": "gemma3_text",
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {"full_attention": _rope(fields)["rope_parameters"], "sliding_attention": sliding},
        # 62 layers: Gemma 3 27B, as in llama.cpp.
        "query_pre_attn_scalar": fields.usual_head_dim if layers == 62 else fields.head_dim,
        "final_logit_softcapping": capped or None,
    }


ARCHITECTURES: dict[str, Callable[[ModelFields], ConfigFields]] = {
    "llama": _llama, "qwen2": _rope, "qwen3": _qwen3, "phi3": _phi3, "gemma3": _gemma3, "smollm3": _llama,
}  # fmt: skip
"""Architecture, as llama.cpp calls it -> its own fields."""
