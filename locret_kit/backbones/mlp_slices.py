"""MLPs of a backbone in slices of rows while it is attached.

Hidden states between an MLP's two matrix products are the widest of a layer, and no token needs another's. A slice is large
enough to lose nothing. With ``SLICE`` rows a matrix product does as many multiplications for each weight that it reads. A card
needs a tenth of that to be busy computing (an H100: about 300 operations in bfloat16 a byte). Chunks up to that length, and
decoding, run as ever.
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .decoder_modules import decoder_of, is_gated
from .undo import Forward, Undo, replace_forward

SLICE = 4096
"""Rows (tokens of all samples) that an MLP sees at most at a time."""


def slice_mlps(undo: Undo, model: PreTrainedModel) -> None:
    """Let every gated MLP of a decoder see at most ``SLICE`` rows at a time until ``undo``."""
    for mlp in filter(is_gated, decoder_of(model).modules()):
        replace_forward(undo, mlp, partial(_sliced, mlp))


def _sliced(mlp: nn.Module, forward: Forward, x: Tensor, *args: object, **named: object) -> Tensor:
    """``forward(x)`` for ``x`` [..., C], in slices of rows if that saves memory. A call with further arguments is not sliced."""
    rows = x.numel() // x.shape[-1]
    if rows <= SLICE or args or named or not _gains(mlp, x):
        return forward(x, *args, **named)
    x_NF, out_NF = x.reshape(rows, -1), x.new_empty(0)
    for start in range(0, rows, SLICE):
        part = forward(x_NF[start : start + SLICE])
        out_NF = out_NF if start else part.new_empty(rows, part.shape[-1])
        out_NF[start : start + SLICE] = part
        del part  # or it would outlive the next slice's products
    return out_NF.view(*x.shape[:-1], -1)


def _gains(mlp: nn.Module, x: Tensor) -> bool:
    """Whether slicing the MLP of ``x``, of shape [..., C], saves memory.

    In a graph it does not, since the graph keeps all tensors between the products. It is also avoided if weights are fetched
    per call. ZeRO-3 gathers them, and its processes must call equally often. accelerate moves in weights from another device
    than ``x``.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return all(weight.device == x.device and not hasattr(weight, "ds_id") for weight in mlp.parameters())
