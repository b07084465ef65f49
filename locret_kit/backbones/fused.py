"""A backbone's elementwise work in fewer launches: norms with the residual before them, gated activations, and no rotation by
zero. Only where the handler of a forward has operations for it; elsewhere, and once it is undone, every module is as it was.

``probe`` tries both on every decoder and compares: they are for those that give the same hidden states.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType

from torch import Tensor
from torch.nn import functional as F

from locret_kernels.fused import rms_norm, swiglu

from .handler import Choice, LayerOperations
from .llama import DecoderStack, GatedMlp, Layer, RmsNorm, is_gated, is_rms_norm, is_silu
from .undo import Undo, has_own_forward, replace_forward

REFERENCE = LayerOperations(rms_norm, swiglu, F.linear)


def skip_rotations(undo: Undo, decoder: DecoderStack, choice: Choice) -> None:
    """Let rotary modules answer None, and rotations pass queries and keys through then, where ``choice`` gives operations,
    until ``undo``."""
    attentions = (layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn"))
    for module in {sys.modules[type(attention).__module__] for attention in attentions}:
        _skip_identity(undo, module)
    replace_forward(undo, decoder.rotary_emb, partial(_no_rotation, choice))


def _no_rotation(choice: Choice, forward: Callable[..., object], x: Tensor, *args: object, **named: object) -> object:
    return forward(x, *args, **named) if choice(x) is None else (None, None)


def fuse_layers(undo: Undo, decoder: DecoderStack, choice: Choice) -> None:
    """Let a decoder's elementwise work be done by the operations that ``choice`` gives, until ``undo``. Modules that are not of
    the known kinds are left as they are, and so are those whose forward somebody has replaced, as accelerate does."""
    for layer in decoder.layers:
        if is_rms_norm(layer.post_attention_layernorm) and has_own_forward(layer):
            replace_forward(undo, layer, partial(_layer, layer, choice))
        if is_gated(layer.mlp) and has_own_forward(layer.mlp):
            replace_forward(undo, layer.mlp, partial(_mlp, layer.mlp, choice))
    for norm in filter(is_rms_norm, decoder.modules()):
        replace_forward(undo, norm, partial(_norm, norm, choice))


def _norm(norm: RmsNorm, choice: Choice, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    operations = choice(x, norm.weight)
    if operations is None or norm.weight.dtype != x.dtype:
        return forward(x)
    return operations.rms_norm(x, norm.weight, norm.variance_epsilon)[0]


def _layer(
    layer: Layer, choice: Choice, forward: Callable[..., Tensor], hidden_states: Tensor, **rest: object
) -> Tensor:
    """A decoder layer, whose first residual is added where its sum is normalised."""
    after = layer.post_attention_layernorm
    if not is_rms_norm(after) or layer.training or after.weight.dtype != hidden_states.dtype:
        return forward(hidden_states, **rest)
    if choice(hidden_states, after.weight) is None:
        return forward(hidden_states, **rest)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **rest)
    operations = choice(attended) or REFERENCE  # a gradient may begin in the attention, as of a pool that is trained
    normed, total = operations.rms_norm(attended, after.weight, after.variance_epsilon, hidden_states)
    return total + layer.mlp(normed)


def _mlp(mlp: GatedMlp, choice: Choice, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A gated MLP, its two inward products apart or in one matrix."""
    if choice(x) is None or not is_silu(mlp):
        return forward(x)
    gate, up = (
        mlp.gate_up_proj(x).chunk(2, dim=-1) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj(x), mlp.up_proj(x))
    )
    operations = choice(gate, up) or REFERENCE  # a gradient may begin in the products before
    out: Tensor = mlp.down_proj(operations.swiglu(gate, up))
    return out


# ---- rotation by zero --------------------------------------------------------------------------------------------------

_LOCK = threading.Lock()
_WRAPPED: dict[ModuleType, tuple[Callable[..., tuple[Tensor, Tensor]], set[Undo]]] = {}
"""Modelling modules whose rotation is wrapped: their own rotation, and the attachments that use the wrapped one."""
ROTATION = "apply_rotary_pos_emb"


def _skip_identity(undo: Undo, module: ModuleType) -> None:
    """Let a modelling module's rotation pass q and k through where it is given no cos, until ``undo``."""

    def restore() -> None:
        with _LOCK:
            own, users = _WRAPPED.get(module, (None, set()))
            users.discard(undo)
            if own is not None and not users:
                setattr(module, ROTATION, own)
                del _WRAPPED[module]

    undo.add(restore)
    with _LOCK:
        own, users = _WRAPPED.setdefault(module, (getattr(module, ROTATION), set()))
        users.add(undo)
        if getattr(module, ROTATION) is own:
            setattr(module, ROTATION, _passing(own))


def _passing(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    @wraps(rotate)
    def passing(q: Tensor, k: Tensor, cos: Tensor | None, *rest: object, **named: object) -> tuple[Tensor, Tensor]:
        return (q, k) if cos is None else rotate(q, k, cos, *rest, **named)

    return passing
