"""Models that another library wraps."""

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

LIBRARIES = ("torch", "peft", "deepspeed", "lightning", "pytorch_lightning")
INNER = ("_orig_mod", "module", "base_model", "model", "_forward_module")
"""Attributes of wrappers that hold the model: ``torch.compile``, parallelism, PEFT (two), Fabric."""
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model inside wrappers; PEFT adapters within its layers stay. An object that is no module but
    has a ``config`` is returned unchanged.

    Raises:
        ValueError: an unknown wrapper, or one that acts outside the model or holds its weights.
    """
    inner: Any = model
    while True:
        name, library = type(inner).__name__, type(inner).__module__.partition(".")[0]
        if any(kind.__name__ in SHARDED for kind in type(inner).__mro__):
            said = "keeps its weights in shards: pass the model before it is sharded, whole on each rank"
            raise ValueError(f"{name} {said}")
        known = isinstance(inner, PreTrainedModel) or (hasattr(inner, "config") and not isinstance(inner, nn.Module))
        if known or hasattr(inner, "description"):  # a stand-in (``Described``) has one
            return cast(PreTrainedModel, inner)
        held = [x for key, x in getattr(inner, "_modules", {}).items() if key in INNER and library in LIBRARIES]
        if not held:
            raise ValueError(f"{name} is neither a model of transformers nor a known wrapper: pass the model itself")
        if library == "peft":
            _check_adapters(inner)
        inner = held[0]


def speaking(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside of wrappers, as ``unwrapped``. Raises ValueError where it makes no logits of the next token too."""
    inner = unwrapped(model)
    if isinstance(inner, PreTrainedModel) and not inner.can_generate():
        raise ValueError(f"{type(inner).__name__} gives no tokens: pass a model with its language model's head")
    return inner


def _check_adapters(model: Any) -> None:
    """Raise ValueError if a PEFT adapter acts on the text outside the layers."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(config.peft_type).removeprefix("PeftType.")
        if config.is_prompt_learning or kind == "XLORA" or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"{type(model).__name__}: adapter {name!r} ({kind}) acts outside the layers, where no bounded cache sees it: "
                "pass the model without it, or one with LoRA"
            )
