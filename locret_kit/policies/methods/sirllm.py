"""SirLLM, arXiv 2405.12528: the token's entropy, the first tokens and the newest."""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ...backbones.decoder_modules import decoder_of
from ..base import Weight
from ..registry import Sinks, Window, part, register

SLICE = 64
"""Tokens whose logits exist at once."""


def token_entropy(
    model: PreTrainedModel, hidden_BTE: Tensor, ids_BT: Tensor, before_B1E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``-log P(token | tokens before it)`` ``[B, T]`` (nats, float32), and the last hidden state for the next call.

    Args:
        hidden_BTE: final hidden states of the tokens ``ids_BT``.
        before_B1E: the hidden state before the first of them; None at the start of a text, whose first token gets 0.
    """
    if model.get_output_embeddings() is None:
        raise ValueError("token entropy needs a model with an output layer (AutoModelForCausalLM)")
    start = 1 if before_B1E is None else 0
    source_BTE = hidden_BTE[:, :-1] if before_B1E is None else torch.cat((before_B1E, hidden_BTE[:, :-1]), dim=1)
    out_BT = torch.zeros(ids_BT.shape, dtype=torch.float32, device=hidden_BTE.device)
    for at in range(start, ids_BT.shape[1], SLICE):
        target_BN = ids_BT[:, at : at + SLICE]
        hidden_BNE = source_BTE[:, at - start : at - start + target_BN.shape[1]]
        logits_BNV = own_logits(model, hidden_BNE, target_BN).float()
        out_BT[:, at : at + SLICE] = F.cross_entropy(logits_BNV.transpose(1, 2), target_BN, reduction="none")
    return out_BT, hidden_BTE[:, -1:].clone()


@part("score", "entropy")
class Entropy(Weight):
    """``-log P(token | tokens before it)`` under the backbone as it reads with this cache: one number per token, the same in
    every layer and head; 0 for the first token of a text. Source: SirLLM, arXiv 2405.12528."""

    needs_logits: ClassVar[bool] = True

    def score_by_logits(
        self, model: PreTrainedModel, hidden_BTE: Tensor, ids_BT: Tensor, before_B1E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return token_entropy(model, hidden_BTE, ids_BT, before_B1E)


register(
    "sirllm",
    "SirLLM, arXiv 2405.12528",
    {"score": Entropy(), "scopes": (Sinks(), Window(0.125))},
    names={"n": "sinks", "size": "window"},
    keeps="the token's entropy",
)


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
    outermost = copied = _shallow(model)
    for name in path.split("."):
        inner = copied._modules[name] = _shallow(cast(nn.Module, copied._modules[name]))
        copied = inner
    copied.__dict__["forward"] = lambda *args, **kwargs: _FinalStates(last_hidden_state=hidden_BTE)
    return type(outermost).forward(outermost, input_ids=ids_BT, use_cache=False, return_dict=True).logits


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of a module with the same parameters and submodules, so that a submodule can be replaced. It uses the forward of its
    class, because a patched forward calls the original module."""
    new = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__["_modules"] = dict(module._modules)
    new.__dict__.pop("forward", None)
    return new
