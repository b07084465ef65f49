"""A forward cut into blocks, after each of which its handler reads the final hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .handler import Handler


def read_blocks(handler: Handler, run: Callable[..., Any], forward: Callable[..., Any], **kwargs: Any) -> Any:
    """One forward, cut into the handler's blocks; after each of them it reads the final hidden states."""
    ids = kwargs.get("input_ids")
    tokens = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
    start, output, hidden = 0, None, []
    for length in handler.blocks(tokens):
        new = slice(start, start + length)
        piece = {name: _of_tokens(value, new, tokens) for name, value in kwargs.items() if name != "attention_mask"}
        output = run(handler, forward, **piece)
        handler.read(output.last_hidden_state, None if ids is None else ids[:, new])
        hidden.append(output.last_hidden_state)
        start += length
    if output is not None and len(hidden) > 1:
        output.last_hidden_state = torch.cat(hidden, dim=1)
    return output


def _of_tokens(value: Any, new: slice, tokens: int) -> Any:
    """Part of a forward's argument that belongs to some of its tokens."""
    if isinstance(value, Tensor) and value.dim() > 1:
        if value.shape[1] == tokens:
            return value[:, new]
        if value.shape[-1] == tokens:
            return value[..., new]
    return value
