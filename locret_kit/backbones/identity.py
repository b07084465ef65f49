"""Identity of a backbone and of a tokenizer by content: two folders with the same weights are the same model."""

import fnmatch
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import pointer_note
from ..hub import pull
from ..naming import prefixed_errors
from .spec import text_config
from .weight_bits import gguf_types, weight_bits_of
from .wrapped import unwrapped

SAMPLES = 256
"""Numbers of each weight that the fingerprint reads, evenly spread."""
CONFIG = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps",
    "max_position_embeddings", "original_max_position_embeddings", "sliding_window", "layer_types", "rope_parameters",
    "partial_rotary_factor", "attention_multiplier", "query_pre_attn_scalar",
)  # fmt: skip
"""Fields of a configuration that decide the computation of the layers."""
NAMES = ("name", "revision")
"""Fields of an identity that are for people to read."""
CLOSE = 1e-6
"""Relative difference of numbers that are the same."""
PROBE = "Naïve  tabs\tand\n\nlines, 1234 numbers; 日本語 — “quotes” <|x|> CamelCase don't"
"""Text whose ids tell tokenizers with the same vocabulary apart."""


def identity_of(model: PreTrainedModel) -> dict[str, object]:
    """Identity of a model: ``NAMES``, for people to read, and ``config``, ``weight_bits`` (or the types of a GGUF file) and
    ``weights``, which tell models apart. Plain JSON values.

    Raises:
        ValueError: weights lie on no device, as after an offload.
    """
    model, config = unwrapped(model), text_config(model)
    known = config.to_dict()  # a size that differs from layer to layer is no attribute
    fields = {name: known[name] if name in known else getattr(config, name, None) for name in CONFIG}
    path = Path(str(config._name_or_path))
    return {
        "name": path.name if path.is_absolute() else config._name_or_path,
        "revision": getattr(config, "_commit_hash", None),
        "config": json.loads(json.dumps({name: value for name, value in fields.items() if value is not None})),
        "weight_bits": weight_bits_of(model) or gguf_types(config),
        "weights": fingerprint(model.parameters(), SAMPLES),
    }


def stored_weights(name: str, names: Iterable[str]) -> Iterator[Tensor]:
    """Weights of any shape by name, one at a time, from the files of a model that is not loaded: a folder or a Hub repository.

    Raises:
        ValueError: a weight is missing, or a file is damaged.
    """
    folder, where, wanted = Path(name), dict[str, Path](), "*.safetensors"
    files = sorted(folder.glob(wanted)) if folder.exists() else pull(name, lambda all_: fnmatch.filter(all_, wanted))
    for path in files:
        said = f"{path} cannot be read{pointer_note(path)}"
        with prefixed_errors(said, SafetensorError), safe_open(path, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path)
    for weight in names:
        if weight not in where:
            raise ValueError(f"{name} holds no weight {weight} in .safetensors: no document can be compared with it")
        with safe_open(where[weight], framework="pt") as file:
            yield file.get_tensor(weight)


def fingerprint(weights: Iterable[Tensor], samples: int | None = None) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the weights' shapes and numbers, rounded to bfloat16. It is equal for a
    bfloat16 and a float32 copy.

    Args:
        weights: of any shape. samples: numbers of each weight, evenly spread; None reads all.

    Raises:
        ValueError: a weight lies on no device.
    """
    digest = hashlib.sha256()
    for weight in weights:
        if weight.is_meta:
            raise ValueError("weights put off their device have no fingerprint: load the model without offload")
        flat = weight.detach().flatten()
        if samples is not None and len(flat) > samples:
            flat = flat[:: len(flat) // samples][:samples]
        exact = flat.to(torch.bfloat16).view(torch.int16) if flat.is_floating_point() else flat
        digest.update(f"{tuple(weight.shape)}".encode())
        digest.update(exact.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Hashes of the ``vocabulary`` (with the ids of a probe) and of the chat ``template``."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    template = getattr(tokenizer, "chat_template", None)
    vocabulary = _short(json.dumps([words, tokenizer(PROBE).input_ids]))
    return {"vocabulary": vocabulary, "template": None if template is None else _short(json.dumps(template))}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def first_difference(there: object, here: object, name: str = "") -> str | None:
    """Words for the first difference of two JSON values: ``config.rope_theta: 10000.0 in the file, 500000.0 here``. Numbers
    may differ by ``CLOSE``, since devices compute frequencies in their own way."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*here, *(key for key in there if key not in here)]:
            whole = f"{name}.{key}" if name else str(key)
            if key not in there or key not in here:
                return f"{whole}: {'missing in' if key in here else 'unknown, but in'} the file"
            if found := first_difference(there[key], here[key], whole):
                return found
        return None
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"{name}: {len(there)} values in the file, {len(here)} here"
        pairs = enumerate(zip(there, here, strict=True))
        return next((found for i, pair in pairs if (found := first_difference(*pair, f"{name}[{i}]"))), None)
    if isinstance(there, float) and isinstance(here, int | float) and type(here) is not bool:
        same = math.isclose(there, here, rel_tol=CLOSE)
    else:
        same = there == here and type(there) is type(here)
    return None if same else f"{name}: {_shown(there)} in the file, {_shown(here)} here"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}..."
