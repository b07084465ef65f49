"""Products in bfloat16 on a CPU while a backbone is attached: of many rows without instructions for it, and of the last layer.

Of many rows the weights are widened to float32 for the product, which is rounded once. PyTorch's own takes several times as
long there, and sums in float32 too.
"""

import platform
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .decoder_modules import decoder_of
from .handlers import Choice
from .undo import Forward, Undo, has_own_forward, replace_forward

FEWEST = 64
"""Fewest rows of a product that make widening its weights faster."""
AT_ONCE = 1 << 22
"""Weights that are widened at a time."""


@cache
def lacks_bfloat16() -> bool:
    """Whether this processor must widen numbers of bfloat16 to compute with them, as x86 without AVX512_BF16 and AMX."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return not any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def widen(undo: Undo, model: PreTrainedModel, choice: Choice) -> None:
    """Run a decoder's bfloat16 products by the operations of ``choice``, until ``undo``, on a processor without fast ones."""
    if model.dtype == torch.bfloat16 and lacks_bfloat16():
        for linear in decoder_of(model).modules():
            # No codes of another library.
            if type(linear) is nn.Linear and has_own_forward(linear) and type(linear.weight.data) is Tensor:
                replace_forward(undo, linear, partial(_widened, linear, choice))


def _widened(linear: nn.Linear, choice: Choice, forward: Forward, x: Tensor) -> Tensor:
    """The linear map of ``x``, of shape [..., C], by the operations of ``choice`` if there are any."""
    operations = choice(x, linear.weight)
    return forward(x) if operations is None else operations.linear(x, linear.weight, linear.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``x`` [..., C] and ``weight`` [N, C], with widened weights if that is faster."""
    alike = x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu"
    graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not alike or graph or x.numel() < FEWEST * x.shape[-1] or not lacks_bfloat16():
        return F.linear(x, weight, bias)
    wide, step = x.float(), max(1, AT_ONCE // weight.shape[1])
    out = x.new_empty(*x.shape[:-1], len(weight))
    for start in range(0, len(weight), step):
        some = slice(start, start + step)
        out[..., some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return out


def _as_rows(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states [B, T, C] as rows of one matrix. For the last token alone, a slice, PyTorch makes a batch of matrices.
    In bfloat16 on a CPU it copies the vocabulary's weights for that at every call."""
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
