"""Logits that a language model makes of final hidden states, with a scale (Granite, Cohere) or a cap (Gemma 2) of its own."""

from typing import TypeVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from .decoder_modules import decoder_of

M = TypeVar("M", bound=nn.Module)


class _FinalStates(MoeModelOutputWithPast):
    """Output of a decoder: its final hidden states. All else is None, as where a forward was not asked for it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def own_logits(model: PreTrainedModel, hidden_BTE: Tensor, ids_BT: Tensor) -> Tensor:
    """Logits [B, T, V], by the model's own forward around its decoder.

    Args:
        hidden_BTE: final hidden states of the decoder. ids_BT: any token ids.
    """
    decoder = decoder_of(model)
    path = next(name for name, module in model.named_modules() if module is decoder)
    # Copies of the modules on the way, since other threads may run the model meanwhile.
    outermost = _shallow(model)
    copied: nn.Module = outermost
    for name in path.split("."):
        inner = copied._modules[name] = _shallow(cast(nn.Module, copied._modules[name]))
        copied = inner
    copied.__dict__["forward"] = lambda *args, **kwargs: _FinalStates(last_hidden_state=hidden_BTE)
    logits: Tensor = type(outermost).forward(outermost, input_ids=ids_BT, use_cache=False, return_dict=True).logits
    return logits


def _shallow(module: M) -> M:
    """A copy of a module with the same parameters and submodules, so that a submodule can be replaced. It uses the forward of its
    class, because a patched forward calls the original module."""
    new = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__["_modules"] = dict(module._modules)
    new.__dict__.pop("forward", None)
    return new
