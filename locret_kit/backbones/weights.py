"""A backbone's weights: plain matrices and vectors for computing without its modules; weights in 4 or 8 bits; the names of a GGUF
file's types; and identities."""

import fnmatch
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from locret_kernels.fused import rms_norm
from locret_kernels.product import unpack

from ..files import pointer_note
from ..hub import pull
from ..naming import install_line, prefixed_errors
from .bfloat16 import is_own_hook
from .decoder_attention import rotate
from .decoder_modules import Layer, decoder_of, is_rms_norm, is_silu
from .gguf.gguf_model import PackedEmbedding, PackedLinear
from .probe import describe
from .products import PLAIN, NotDense, Product, pieces, product_of, projections
from .spec import text_config
from .undo import has_own_forward
from .wrapped import unwrapped

PACKED = (PackedEmbedding, PackedLinear)
"""Modules beside PyTorch's and transformers' whose weights are known."""


PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")
"""Matrices of a layer."""


class Norm(NamedTuple):
    """A norm as Llama's."""

    weight: Tensor
    eps: float


class DenseLayer(NamedTuple):
    """``x += out(attention(norm(x)))``, then ``x += down(silu(gate(h)) * up(h))`` with ``h = mlp_norm(x)``."""

    norm: Norm
    query: Product
    key: Product
    value: Product
    query_norm: Norm | None
    """Norm of each head's channels, before RoPE."""
    key_norm: Norm | None
    out: Product
    mlp_norm: Norm
    gate: Product
    up: Product
    down: Product
    scaling: float
    """Factor of the logits of attention."""

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(getattr(self, name) for name in PRODUCTS)


class Dense(NamedTuple):
    """A decoder and the product that makes logits of its last hidden state.

    Attributes:
        words: rows of the tokens; nothing is multiplied with them.
    """

    words: Product
    layers: tuple[DenseLayer, ...]
    norm: Norm
    head: Product

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return self.norm.weight.dtype

    @property
    def is_packed(self) -> bool:
        """Whether a matrix is."""
        products = (self.words, self.head, *(product for layer in self.layers for product in layer.products))
        return any(product.form is not None for product in products)


def dense(model: PreTrainedModel) -> Dense:
    """The weights of a model; nothing is copied, and memory that the model lets go of meanwhile stays.

    Raises:
        NotDense: another architecture, modules that were exchanged (adapters, quantised weights), hooks, or several devices.
    """
    if model.training:
        raise NotDense("the backbone is in training mode")
    decoder, head = decoder_of(model), model.get_output_embeddings()
    for module in (model, *decoder.modules(), head):
        known = type(module) in PACKED or type(module).__module__.startswith(("transformers.", "torch.nn."))
        if not known:  # what it does is its own
            raise NotDense(f"a {type(module).__name__} stands in for a module of the backbone")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        patched = not has_own_forward(module) or nn.modules.module._has_any_global_hook()
        if patched or not all(map(is_own_hook, hooks)):
            raise NotDense(f"a {type(module).__name__} of the backbone has hooks, or the forward of another")
    description = describe(model)
    if (unlike := description.unlike_llama) is not None:
        raise NotDense(unlike)
    if not description.fuses_layers:
        raise NotDense("its layers are not Llama's: other norms, residuals or experts")
    if description.scales_queries:
        raise NotDense("its queries are scaled by their positions")
    try:
        words = _words(decoder.embed_tokens)
        found = Dense(words, tuple(map(_layer, decoder.layers)), _norm(decoder.norm), product_of(head))
    except AttributeError as error:
        raise NotDense(f"a module of another name: {error}") from error
    tensors = [*decoder.parameters(), *head.parameters()]
    if any(type(x) not in PLAIN or not x.is_contiguous() for x in tensors):
        raise NotDense("weights that are no plain tensors")
    plain = {x.dtype for x in tensors if x.is_floating_point()}
    if len(plain) > 1 or len({x.device for x in tensors}) > 1:
        raise NotDense("weights of several types or on several devices")
    return found


@torch.no_grad()
def check_dense(model: PreTrainedModel, weights: Dense) -> None:
    """Raise NotDense if the model's own logits of a few tokens differ from those of its weights in the form of ``Dense``. Some
    models scale words, cap logits, or norm heads in another way."""
    description, (D,) = describe(model), {layer.key_size for layer in describe(model).spec.layers}
    ids_T = torch.arange(2, 6, device=weights.norm.weight.device)
    x = weights.words.weight[ids_T]
    if weights.words.form is not None:
        x = unpack(x, weights.words.form).to(weights.dtype)
    for layer, rope in zip(weights.layers, description.ropes(model, len(ids_T)), strict=True):
        normed = _normed(x, layer.norm)
        made = (product(normed) for product in (layer.query, layer.key, layer.value))
        q, k, v = (x.unflatten(-1, (-1, D)).transpose(0, 1) for x in made)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = _normed(q, layer.query_norm), _normed(k, layer.key_norm)
        cos, sin = rope.tables(torch.arange(len(ids_T), device=x.device), x.dtype)
        q, k = rotate(q[None], cos, sin), rotate(k[None], cos, sin)
        out = F.scaled_dot_product_attention(q, k, v[None], is_causal=True, scale=layer.scaling, enable_gqa=True)
        x = x + layer.out(out[0].transpose(0, 1).flatten(1))
        normed = _normed(x, layer.mlp_norm)
        x = x + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
    logits = weights.head(_normed(x, weights.norm))
    own = model(input_ids=ids_T[None], use_cache=False).logits[0]
    # Packed matrices round activations to 8 bits: the last bit of a number may turn a code.
    allowed = 1e-3 if x.dtype.itemsize > 2 and not weights.is_packed else 0.1
    if not bool((logits.float() - own.float()).abs().max() <= allowed * own.float().abs().max()):
        raise NotDense("its logits are not what its matrices give by the form of Llama's")


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """The norm of ``x``, of shape [..., C]."""
    return rms_norm(x, norm.weight, norm.eps)[0]


def _layer(layer: Layer) -> DenseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if len([module for module in layer.children() if is_rms_norm(module)]) != 2:
        raise NotDense("its layers have other norms than Llama's")
    if not is_silu(mlp):
        raise NotDense("its MLPs have another activation than SiLU")
    query, key, value = projections(attention)
    if hasattr(mlp, "gate_up_proj"):
        both = product_of(mlp.gate_up_proj)
        gate, up = pieces(both, (len(both.weight) // 2,) * 2)
    else:
        gate, up = product_of(mlp.gate_proj), product_of(mlp.up_proj)
    normed = hasattr(attention, "q_norm")
    return DenseLayer(
        norm=_norm(layer.input_layernorm),
        query=query, key=key, value=value,
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        out=product_of(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=gate, up=up, down=product_of(mlp.down_proj),
        scaling=attention.scaling,
    )  # fmt: skip


def _words(module: Any) -> Product:
    if type(module) not in (PackedEmbedding, nn.Embedding):
        raise NotDense(f"its words are a {type(module).__name__}")
    return Product(module.weight.detach(), None, getattr(module, "form", None))


def _norm(module: object) -> Norm:
    if not is_rms_norm(module):
        raise NotDense(f"a {type(module).__name__} among its norms")
    return Norm(module.weight.detach(), module.variance_epsilon)


# ---- weights in 4 or 8 bits, through bitsandbytes -------------------------------------------------------------------

# Matrices of the layers are stored so; embeddings, norms, biases and the language model's head stay in the backbone's dtype.
# 4 bits are NormalFloat with doubly quantised scales, computed in that dtype (QLoRA, arXiv 2305.14314); 8 bits are LLM.int8()
# (arXiv 2208.07339), computed in int8, with columns of large activations in float16. Quantised while loading, on the device.


WEIGHT_BITS = (8, 4)
BLOCK, NESTED = 64, 256
"""Weights that share a scale, and scales that share one in turn."""
CODEBOOKS = 4 * (16 + 256) + 4
"""Bytes beside each 4-bit matrix: values of weights' and of scales' codes, and the scales' mean."""


def check_weight_bits(bits: int | None) -> None:
    """Raise ValueError for bits that weights cannot have."""
    if bits is not None and bits not in WEIGHT_BITS:
        raise ValueError(f"weight_bits={bits} must be {' or '.join(map(str, WEIGHT_BITS))}")


def quantisation(bits: int, dtype: torch.dtype, device: torch.device) -> BitsAndBytesConfig:
    """transformers' configuration that quantises weights while they are loaded.

    Raises:
        ValueError: other bits, or a device without kernels in bitsandbytes. ImportError: bitsandbytes is not installed.
    """
    check_weight_bits(bits)
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"weight_bits={bits} needs bitsandbytes: {install_line('quantised')}")
    # It says once for each matrix and call that activations become float16 for LLM.int8().
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes import supported_torch_devices

    if device.type not in supported_torch_devices:
        raise ValueError(f"weight_bits={bits} runs on {', '.join(sorted(supported_torch_devices))}, not on {device}")
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def weight_bits_of(model: PreTrainedModel) -> int | None:
    """Bits of a loaded model's weights; None where they are in its dtype."""
    return next((bits for bits in WEIGHT_BITS if getattr(unwrapped(model), f"is_loaded_in_{bits}bit", False)), None)


def gguf_types(config: PreTrainedConfig) -> str | None:
    """Name of the types of a GGUF file's weights, such as Q4_K_M; None where the configuration is no such file's."""
    gguf = getattr(config, "gguf", None)
    return gguf["types"] if gguf else None


def precision_of(model: PreTrainedModel) -> str:
    """Precision of a backbone, for reports: ``bfloat16``, ``bfloat16, 4-bit weights`` or ``float32, Q4_K_M weights``."""
    return str(model.dtype).removeprefix("torch.") + suffix(weight_bits_of(model), gguf_types(text_config(model)))


def suffix(bits: int | None, types: str | None = None) -> str:
    """Text after a dtype: ``, 4-bit weights`` or ``, Q4_K_M weights``, or nothing where weights are in it."""
    return f", {types} weights" if types else f", {bits}-bit weights" if bits else ""


def stored_bytes(inputs: int, outputs: int, bits: int) -> int:
    """Bytes of a matrix as bitsandbytes keeps it."""
    if bits == 8:
        return inputs * outputs + 4 * outputs  # a float32 scale an output
    blocks = -(-inputs * outputs // BLOCK)
    return -(-inputs * outputs // 2) + blocks + 4 * -(-blocks // NESTED) + CODEBOOKS


def scratch_bytes(tokens: int, inputs: int, outputs: int, bits: int, item: int) -> int:
    """Temporary bytes of a product of ``tokens`` tokens with a quantised matrix, besides its input and its output.

    4 bits: the matrix in the dtype (``item`` bytes per number) and its scales, before and after their mean is added. 8 bits:
    activations in int8, products in int32 and float16. The few columns of large activations are not counted.
    """
    if bits == 8:
        return tokens * (inputs + outputs * (4 + 2))
    return inputs * outputs * item + 2 * 4 * -(-inputs * outputs // BLOCK)


# ---- identity of a backbone and of a tokenizer by content: two folders with the same weights are the same model -----

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
