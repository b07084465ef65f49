"""Modules of a decoder of Llama's form, with the members that are read by name. Modules of another form lack some of them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .undo import has_own_forward
from .wrapped import unwrapped


class RmsNorm(nn.Module):
    """A norm that scales the rounded, normed input by its weight."""

    weight: Tensor
    variance_epsilon: float


class GatedMlp(nn.Module):
    """An MLP whose two inward products are apart, or in one matrix as Phi-3's."""

    gate_up_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module


class Attention(nn.Module):
    """Attention with its four products."""

    config: PreTrainedConfig
    head_dim: int
    scaling: float


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual around both."""

    input_layernorm: nn.Module
    self_attn: Attention
    post_attention_layernorm: nn.Module
    mlp: GatedMlp


class DecoderStack(PreTrainedModel):
    """A stack of layers, without a head of the language model."""

    layers: Sequence[Layer]
    rotary_emb: nn.Module


class DecoderOutput(Protocol):
    """Output of a forward of the stack."""

    last_hidden_state: Tensor


Forward = Callable[..., DecoderOutput]
"""The stack's own, or what stands in its place."""


def is_rms_norm(module: Any) -> TypeGuard[RmsNorm]:
    """Whether a module is a norm as Llama's."""
    name = type(module).__name__
    return name.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and is_untouched(module)


def device_of(module: nn.Module) -> torch.device | None:
    """Device on which a module computes: of its weights, or that to which accelerate brings them; None without weights."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    brought = (getattr(hook, "execution_device", None) for hook in hooks)
    places = [*(x.device for x in module.parameters() if not x.is_meta), *(x for x in brought if x is not None)]
    return torch.device(places[0]) if places else None


def is_untouched(module: Any) -> bool:
    """Whether a module has no hooks and its own forward."""
    return has_own_forward(module) and not (module._forward_hooks or module._forward_pre_hooks)


def is_gated(mlp: nn.Module) -> TypeGuard[GatedMlp]:
    """Whether a module is an MLP as Llama's, or as Phi-3's."""
    inward = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    products = [getattr(mlp, name, None) for name in (*inward, "down_proj")]
    return all(isinstance(product, nn.Module) for product in products)


def is_silu(mlp: nn.Module) -> bool:
    """Whether the activation between an MLP's products is SiLU."""
    named = (getattr(mlp, name, None) for name in ("act_fn", "activation_fn", "act"))
    return any(type(one).__name__ in ("SiLU", "SiLUActivation") and is_untouched(one) for one in named)


def decoder_of(model: PreTrainedModel) -> DecoderStack:
    """The decoder stack (``model.model`` and its likes) below wrappers and heads of the language model."""
    inner: Any = unwrapped(model)
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner.base_model
    if isinstance(decoder, nn.Linear):  # a head that is called decoder (ModernBERT)
        decoder = inner.base_model
    while hasattr(decoder, "lm_head") and hasattr(decoder, "model"):  # with a head of its own inside (Llama 4)
        decoder = decoder.model
    return decoder._modules.get("_orig_mod", decoder)
