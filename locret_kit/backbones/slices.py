"""MLPs in slices of rows: what is between an MLP's two matrix products is the widest thing in a layer, and no token of it
needs another's.

A slice is large enough to lose nothing: with ``SLICE`` rows a matrix product does as many multiplications for each weight
that it reads, ten times what a card needs to be busy computing (an H100: about 300 operations in bfloat16 a byte). Chunks
up to that length, and decoding, run as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .llama import is_gated
from .spec import decoder_of
from .undo import Undo, replace_forward

SLICE = 4096
"""Rows (tokens of all samples) that an MLP sees at most at a time."""


def slice_mlps(undo: Undo, model: PreTrainedModel) -> None:
    """Let every gated MLP of a decoder see at most ``SLICE`` rows at a time until ``undo``."""
    for mlp in filter(is_gated, decoder_of(model).modules()):
        replace_forward(undo, mlp, partial(_forward, mlp))


def _forward(mlp: nn.Module, forward: Callable[..., Tensor], x: Tensor, *args: object, **named: object) -> Tensor:
    """``forward(x)``, ``x [..., features]``, in slices where that pays. Further arguments may be of each row: not sliced then."""
    rows = x.numel() // x.shape[-1]
    if rows <= SLICE or args or named or not _gains(mlp, x):
        return forward(x, *args, **named)
    x_NF = x.reshape(rows, -1)
    out_NF = x_NF.new_empty(0)
    for start in range(0, rows, SLICE):
        part = forward(x_NF[start : start + SLICE])
        if not start:
            out_NF = part.new_empty(rows, part.shape[-1])
        out_NF[start : start + SLICE] = part
        del part  # or it would outlive the next slice's products
    return out_NF.view(*x.shape[:-1], -1)


def _gains(mlp: nn.Module, x: Tensor) -> bool:
    """Not where a graph keeps everything between the products anyway, nor where weights come anew for every call: ZeRO-3
    gathers them (each process must then call as often, whatever the length of its samples), accelerate moves in those that
    do not lie where ``x`` does."""
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return all(weight.device == x.device and not hasattr(weight, "ds_id") for weight in mlp.parameters())
