"""Weights in 4 or 8 bits, through bitsandbytes, and the names of a GGUF file's types.

Matrices of the layers are stored so. Embeddings, norms, biases and the language model's head stay in the backbone's dtype.
4 bits are NormalFloat with doubly quantised scales, computed in that dtype (QLoRA, arXiv 2305.14314). 8 bits are LLM.int8()
(arXiv 2208.07339), computed in int8, with columns of large activations in float16. Quantised while loading, on the device.
"""

import logging
from importlib.util import find_spec

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from ..naming import install_line
from .spec import text_config
from .wrapped import unwrapped

WEIGHT_BITS = (8, 4)
BLOCK, NESTED = 64, 256
"""Weights that share a scale, and scales that share one in turn."""
CODEBOOKS = 4 * (16 + 256) + 4
"""Bytes beside each 4-bit matrix: values of weights' and of scales' codes, and the scales' mean."""


def quantisation(bits: int, dtype: torch.dtype, device: torch.device) -> BitsAndBytesConfig:
    """transformers' configuration that quantises weights while they are loaded.

    Raises:
        ValueError: other bits, or a device without kernels in bitsandbytes. ImportError: bitsandbytes is not installed.
    """
    if bits not in WEIGHT_BITS:
        raise ValueError(f"weight_bits={bits} must be {' or '.join(map(str, WEIGHT_BITS))}")
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
