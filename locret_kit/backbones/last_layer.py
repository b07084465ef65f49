"""The last layer of a language model, whose hidden states it is given as rows of one matrix."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .undo import Undo


def _as_rows(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states as rows of one matrix. Of a block's last token alone, a slice, PyTorch makes a batch of matrices, and
    in bfloat16 on a CPU copies the vocabulary's weights for it at every call."""
    hidden, *rest = args
    return hidden.reshape(-1, hidden.shape[-1]).contiguous().view(hidden.shape), *rest


def is_own_hook(hook: Callable[..., object]) -> bool:
    """Whether a module's hook is one that ``attach`` has put there."""
    return hook is _as_rows


def give_rows(undo: Undo, words: nn.Module) -> None:
    """Let the last layer see its hidden states ``_as_rows`` until ``undo``."""

    def restore() -> None:
        for key in [key for key, hook in words._forward_pre_hooks.items() if is_own_hook(hook)]:
            del words._forward_pre_hooks[key]

    undo.add(restore)
    words.register_forward_pre_hook(_as_rows)
