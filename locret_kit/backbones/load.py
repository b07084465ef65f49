"""Load a frozen backbone and its tokenizer; every failure is one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str | None) -> torch.device:
    """The named device, or the best there is."""
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: PyTorch sees no CUDA device here")
    return where


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 on accelerators and on CPUs with matrix units for it, float32 on every other CPU."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} must be one of: auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def resolve_model(name: str) -> str:
    """A folder as given, or the same relative path beside the installed project, or a Hub id as it is.

    Raises:
        FileNotFoundError: a relative path under ``checkpoints/`` that is in neither place.
    """
    if Path(name).exists():
        return name
    beside = Path(__file__).resolve().parents[2] / name
    if beside.exists():
        return str(beside)
    if name.startswith(("checkpoints/", "./", "/")):
        hint = " (the demo backbone: python scripts/fetch_backbone.py)" if name.startswith("checkpoints/") else ""
        raise FileNotFoundError(f"model={name!r}: no such folder{hint}")
    return name


def load_backbone(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    adapter: str | None = None,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """``(model, tokenizer)``: frozen, in evaluation mode, on ``device``, with a PEFT adapter merged in where one is named."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where, path = pick_device(device), resolve_model(name)
    precision = pick_dtype(dtype, where)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=precision, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, SafetensorError) as error:  # absent; an unknown architecture; truncated weights
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(f"model={name!r} cannot be loaded: {said}") from error
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return freeze(model.to(where)), tokenizer


def freeze(model: nn.Module) -> nn.Module:
    """Evaluation mode, no gradients."""
    return model.eval().requires_grad_(False)
