"""Ways in which a decoder's attention is asked for.

By name in transformers' interface, or as a method of its modules, ``_attn(query, key, value, mask)``, where it is not behind
that: GPT-J, CodeGen, GPT-NeoX-Japanese.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from .spec import UnsupportedArchitecture
from .undo import Undo

Attended = tuple[Tensor, Tensor | None]
"""Attention's output, and its weights where they are asked for."""
Method = Callable[..., Attended]
"""A module's own, or what answers for it. Queries, keys, values and output are ``[B, heads, T, D]``; a mask comes last."""


def meet_attention(undo: Undo, decoder: PreTrainedModel, config: PreTrainedConfig, name: str, answer: Method) -> None:
    """Let a decoder ask the attention ``name``, or ``answer`` in place of its modules' methods, until ``undo``.

    Raises:
        UnsupportedArchitecture: it has another kind of attention.
    """
    undo.add(partial(decoder.set_attn_implementation, config._attn_implementation))
    decoder.set_attn_implementation(name)
    if config._attn_implementation != name:
        return _answer_methods(undo, decoder, config, name, answer)
    configs = (getattr(module, "config", None) for module in decoder.modules())
    for own in filter(None, configs):  # a layer that was copied has one of its own
        if own._attn_implementation != name:
            undo.add(partial(setattr, own, "_attn_implementation", own._attn_implementation))
            own._attn_implementation = name


def _answer_methods(undo: Undo, decoder: nn.Module, config: PreTrainedConfig, name: str, answer: Method) -> None:
    """Let a decoder make masks as the attention ``name`` has them, and ask ``answer(module, its own method, q, k, v, mask)`` for
    attention, until ``undo``.

    Raises:
        UnsupportedArchitecture: no module has such a method.
    """
    modules = [module for module in decoder.modules() if _is_method(getattr(type(module), "_attn", None))]
    if not modules:
        raise UnsupportedArchitecture("its attention is not behind transformers' interface")
    undo.add(partial(setattr, config, "_attn_implementation", config._attn_implementation))
    config._attn_implementation = name
    for module in modules:
        undo.add(partial(module.__dict__.pop, "_attn", None))
        module.__dict__["_attn"] = partial(answer, module, module._attn)


def _is_method(method: object) -> bool:
    return callable(method) and [*signature(method).parameters][1:] == ["query", "key", "value", "attention_mask"]


def is_softmax(own: Method, q_BHTD: Tensor, rows: int) -> bool:
    """Whether a method is softmax attention of these queries over all of ``rows`` keys, scaled by the root of their size."""
    draw, (_, H, _, D) = torch.Generator("cpu").manual_seed(0), q_BHTD.shape
    both = torch.randn(2, 1, H, rows, D, generator=draw, dtype=torch.float32, device="cpu").to(q_BHTD)
    keys, values, newest = *both, q_BHTD[:1, :, -1:]
    want, got = scaled_dot_product_attention(newest, keys, values), own(newest, keys, values, None)[0]
    return torch.allclose(got, want, rtol=0, atol=0.02 * float(want.abs().max()))
