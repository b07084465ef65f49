"""A model with the weights of a GGUF file. Packed matrices stay in the mapped file, other weights have the model's
data type.

Converters change some weights from the model's form; that is undone here. Sources: ``gguf/tensor_mapping.py`` for
names, llama.cpp's ``convert_hf_to_gguf.py`` for the changes.
"""

import logging
import re
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from locret_kernels import cpp
from locret_kernels.product import FORMATS, product, unpack
from locret_kernels.product import cpu as product_on_cpu

from .gguf_config import FACTORS, LONG, SHORT
from .gguf_file import FLOATS, GgufFile

logger = logging.getLogger(__name__)

# Letters: N rows of the matrix, K its columns.


AT_ONCE = 1 << 22
"""Numbers of a matrix that are unpacked at a time."""
UNPACKED = 12
"""Temporary bytes per weight while unpacking: codes, steps times codes, and their sum with the minimum."""


@cache
def multiplies_integers(form: str) -> bool:
    """Whether the C++ for products of a format runs here; compiles it where it is not yet. Says why it does not, once."""
    try:
        product_on_cpu.load(form)
    except cpp.Unavailable as error:
        logger.warning("matrices of %s are unpacked at every product, which is slower: %s", form, error)
        return False
    return True


def packed_product(x: Tensor, weight: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]`` times a packed matrix ``[N, row_bytes]``, transposed, plus a bias: integer products on a CPU; elsewhere by
    numbers that are unpacked for it, ``AT_ONCE`` at a time."""
    if x.device.type == "cpu" and x.dtype in cpp.DTYPES and multiplies_integers(form):
        return product_on_cpu.product(x, weight, form, bias)
    rows = max(1, AT_ONCE // FORMATS[form].columns(weight.shape[1]))
    parts = [product(x, some, form) for some in weight.split(rows)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return out if bias is None else out + bias


class PackedLinear(nn.Module):
    """``nn.Linear`` with a packed matrix.

    Args:
        weight: ``[N, row_bytes]`` (uint8). form: one of ``FORMATS``. bias: ``[N]``.
    """

    def __init__(self, weight: Tensor, form: str, bias: nn.Parameter | None = None) -> None:
        """Take a packed matrix [N, row_bytes] and a bias [N]; neither is trained."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.form, self.bias = form, bias

    def forward(self, x: Tensor) -> Tensor:
        """The product ``[..., N]`` of inputs ``[..., K]`` with the packed matrix."""
        return packed_product(x, self.weight, self.form, self.bias)


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` with a packed table: the rows of the tokens that are looked up are unpacked.

    Args:
        weight: ``[N, row_bytes]`` (uint8). form: one of ``FORMATS``. dtype: of the answers. scale: their factor, rounded to
            that type (Gemma).
    """

    def __init__(self, weight: Tensor, form: str, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Take a packed table [N, row_bytes], which is not trained."""
        super().__init__()
        self.form, self.dtype, self.scale = form, dtype, scale
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Unpacked rows ``[..., K]`` of token ids of any shape."""
        rows = unpack(self.weight[ids.flatten()], self.form).to(self.dtype).view(*ids.shape, -1)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=self.dtype, device=rows.device)


_LLAMA = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_QWEN3 = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LAYER_NAMES = {
    "llama": _LLAMA, "qwen2": _LLAMA, "smollm3": _LLAMA, "qwen3": _QWEN3,
    "phi3": {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        **_QWEN3, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
"""Architecture -> a layer's tensors and the modules of transformers that they are of."""
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PLACE = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.(?P<kind>weight|bias)\Z")
SCALINGS = (FACTORS, LONG, SHORT)
"""Tensors that are part of the configuration."""
NEIGHBOURS = ("llama", "smollm3")
"""Architectures whose queries and keys are rotated in pairs of neighbours in llama.cpp: the converter permutes their rows."""
ADDED_ONE = ("gemma3",)
"""Architectures to whose norms the converter adds 1."""


def model_of(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with the file's weights.

    Args:
        dtype: of activations, norms and biases, and of matrices that the file holds as plain numbers.

    Raises:
        ValueError: a tensor that the architecture does not have, lacks, or has in another shape; it is named.
    """
    if file.architecture not in LAYER_NAMES:
        said = "%s: its matrices are unpacked, which takes the memory of a model of %s: %s is read by transformers"
        logger.warning(said, file.path.name, str(dtype).removeprefix("torch."), file.architecture)
        return _unpacked(file.path, config, dtype)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, place in file.tensors.items():
        if name in SCALINGS:
            continue
        path, kind = _place(file.architecture, name)
        try:
            module = model.get_submodule(path)
            shape = getattr(module, kind).shape
        except AttributeError as error:
            raise ValueError(f"{name} is unknown for {file.architecture}") from error
        if tuple(shape) != place.shape:
            raise ValueError(f"{name} is {place.shape}, expected {tuple(shape)}")
        data = file.tensor(name)
        if file.architecture in NEIGHBOURS and path.endswith(tuple(heads)):
            # Channels of a rotated pair are half a head apart; llama.cpp has them side by side.
            pairs = data.unflatten(0, (heads[path[-len("q_proj") :]], -1, 2))
            data = pairs.transpose(1, 2).flatten(0, 2)
        if place.form in FLOATS:
            one = float(file.architecture in ADDED_ONE and len(place.shape) == 1)
            value = (data.float() - one if one else data).to(dtype)
            module.register_parameter(kind, nn.Parameter(value, requires_grad=False))
        elif isinstance(module, nn.Embedding):
            scale = float(dict(module.named_buffers()).get("embed_scale", 1.0))
            model.set_submodule(path, PackedEmbedding(data, place.form, dtype, scale))
        elif isinstance(module, nn.Linear):
            model.set_submodule(path, PackedLinear(data, place.form, module.bias))
        else:
            raise ValueError(f"{name} is of type {place.form}, which a {type(module).__name__} cannot have")
    if config.tie_word_embeddings:  # the embedding table is the last layer, too
        words = model.get_input_embeddings()
        if isinstance(words, PackedEmbedding):
            model.lm_head = PackedLinear(words.weight.data, words.form)
        model.lm_head.weight = words.weight
    if absent := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise ValueError(f"weights are missing: {', '.join(absent[:3])}" + " and more" * (len(absent) > 3))
    return model


def plain_model(file: GgufFile, config: PreTrainedConfig) -> PreTrainedModel:
    """The model in bfloat16 with every matrix in plain numbers, for a folder of its own. Raises ValueError at an unfit tensor."""
    packed = model_of(file, config, torch.bfloat16)
    forms = {f"{path}.weight": str(module.form) for path, module in packed.named_modules() if hasattr(module, "form")}
    state = packed.state_dict()
    state |= {name: unpack(state[name], form).to(torch.bfloat16) for name, form in forms.items()}
    plain = copy(config)
    plain.eos_token_id = file.token_id("eos")
    del plain.gguf
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(plain, dtype=torch.bfloat16)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model


def _unpacked(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that transformers reads out of a file, every matrix in plain numbers.

    Raises:
        ValueError: weights are missing, or have another shape.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=dtype, output_loading_info=True,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    model, found = loaded
    if absent := sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]):
        raise ValueError(f"weights are missing: {', '.join(absent[:3])}" + " and more" * (len(absent) > 3))
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _place(architecture: str, name: str) -> tuple[str, str]:
    """Path of the module that a tensor is of, and its parameter's name."""
    match = PLACE.match(name)
    names = LAYER_NAMES[architecture] if match and match["layer"] else NAMES
    if match is None or match["name"] not in names:
        raise ValueError(f"{name} is unknown for {architecture}")
    layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return layer + names[match["name"]], match["kind"]
