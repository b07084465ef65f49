"""Logits that a language model makes of final hidden states, with all that it does beside its output layer: a scale (Granite,
Cohere), a cap (Gemma 2)."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from .spec import decoder_of

M = TypeVar("M", bound=nn.Module)


class _FinalStates(MoeModelOutputWithPast):
    """Output of a decoder: its final hidden states. All else is None, as where a forward was not asked for it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def own_logits(model: PreTrainedModel, hidden_BTE: Tensor, ids_BT: Tensor) -> Tensor:
    """Logits ``[B, T, V]``, by the model's own forward around its decoder.

    Args:
        hidden_BTE: what the decoder gave. ids_BT: any tokens, as many.
    """
    decoder = decoder_of(model)
    path = next(name for name, module in model.named_modules() if module is decoder)
    # Copies of the modules on the way, since other threads may run the model meanwhile.
    outermost = _shallow(model)
    copied: nn.Module = outermost
    for name in path.split("."):
        inner = copied._modules[name] = _shallow(cast(nn.Module, copied._modules[name]))
        copied = inner
    vars(copied)["forward"] = lambda *args, **kwargs: _FinalStates(last_hidden_state=hidden_BTE)
    logits: Tensor = type(outermost).forward(outermost, input_ids=ids_BT, use_cache=False, return_dict=True).logits
    return logits


def _shallow(module: M) -> M:
    """A module with the same parameters and modules, of which one can be replaced. Its forward is its class's: one that somebody
    put there calls the module itself."""
    new = object.__new__(type(module))
    vars(new).update(vars(module))
    vars(new)["_modules"] = dict(module._modules)
    vars(new).pop("forward", None)
    return new
