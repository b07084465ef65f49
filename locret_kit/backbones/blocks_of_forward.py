"""A forward cut into blocks, after each of which its handler reads the final hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .handler import Handler
from .llama import DecoderOutput, Forward


def read_blocks(handler: Handler, run: Forward, forward: Forward, **kwargs: Any) -> DecoderOutput:
    """One forward, cut into the handler's blocks; after each of them it reads the final hidden states."""
    ids = kwargs.get("input_ids")
    tokens = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
    start, outputs = 0, list[DecoderOutput]()
    for length in handler.blocks(tokens):
        new = slice(start, start + length)
        piece = {name: _of_tokens(value, new, tokens) for name, value in kwargs.items() if name != "attention_mask"}
        outputs.append(run(handler, forward, **piece))
        handler.read(outputs[-1].last_hidden_state, None if ids is None else ids[:, new])
        start += length
    if len(outputs) > 1:
        outputs[-1].last_hidden_state = torch.cat([output.last_hidden_state for output in outputs], dim=1)
    return outputs[-1]


def _of_tokens(value: object, new: slice, tokens: int) -> object:
    """Part of a forward's argument that belongs to some of its tokens."""
    if isinstance(value, Tensor) and value.dim() > 1:
        if value.shape[1] == tokens:
            return value[:, new]
        if value.shape[-1] == tokens:
            return value[..., new]
    return value
