"""Rotations by zero, left out while a backbone is attached."""

import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType

from torch import Tensor

from .decoder_modules import DecoderStack
from .handlers import Choice
from .undo import Undo, replace_forward

Pair = tuple[Tensor, Tensor]
"""Queries and keys."""
_LOCK = threading.Lock()
_WRAPPED: dict[ModuleType, tuple[Callable[..., Pair], set[Undo]]] = {}
"""Modelling modules whose rotation is wrapped: their own rotation, and the attachments that use the wrapped one."""
ROTATION = "apply_rotary_pos_emb"


def skip_rotations(undo: Undo, decoder: DecoderStack, choice: Choice) -> None:
    """Let rotary modules answer None, and rotations pass queries and keys through then, where ``choice`` gives operations,
    until ``undo``."""
    attentions = (layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn"))
    for module in {sys.modules[type(attention).__module__] for attention in attentions}:
        _skip_identity(undo, module)
    replace_forward(undo, decoder.rotary_emb, partial(_no_rotation, choice))


def _no_rotation(choice: Choice, forward: Callable[..., object], x: Tensor, *args: object, **named: object) -> object:
    """The answer (None, None) of a rotary module for hidden states [B, T, C], if ``choice`` gives operations for them."""
    return forward(x, *args, **named) if choice(x) is None else (None, None)


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
            setattr(module, ROTATION, wraps(own)(partial(_rotated, own)))


def _rotated(
    rotate: Callable[..., Pair], q: Tensor, k: Tensor, cos: Tensor | None, *rest: object, **named: object
) -> Pair:
    """q [B, Q, T, D] and k [B, H, T, D], rotated unless cos is None."""
    return (q, k) if cos is None else rotate(q, k, cos, *rest, **named)
