"""Refusals of what a forward over a bounded cache must not be given."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backbones.handler import Arguments


def check_arguments(arguments: Arguments, seen: int) -> None:
    """Raise ValueError unless a forward's new tokens go on where a cache ends, after ``seen`` tokens, and none is padding."""
    _refuse_padding(arguments.get("attention_mask"))
    ids = arguments.get("input_ids")
    new = arguments.get("inputs_embeds") if ids is None else ids
    if new is not None:
        _refuse_other_places(seen, new.shape[1], arguments.get("position_ids"))


def _refuse_padding(mask: object) -> None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask={shape}: a bounded cache is causal, it takes ones [batch, tokens] or none")
    if mask is not None and mask.shape[1] > 1 and not bool(mask.all()):
        raise ValueError(
            f"attention_mask has {int((mask == 0).sum())} padded positions; a bounded cache takes one text, and a "
            "padded batch a BatchCache"
        )


def _refuse_other_places(seen: int, tokens: int, position_ids: object) -> None:
    """New tokens must continue where the cache ends. Calling `generate` twice with the same text or with ``use_cache=False``
    violates this, and so does a packed text."""
    if not tokens or (isinstance(position_ids, Tensor) and not position_ids.numel()):
        raise ValueError(f"no new tokens: this cache has seen {seen}, and generate takes those again before new ones")
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        return
    places_T = torch.arange(seen, seen + tokens, device=position_ids.device)
    if position_ids.shape[1] != tokens or not bool((position_ids == places_T).all()):
        first, last = position_ids[0, 0].item(), position_ids[0, -1].item()
        raise ValueError(
            f"position_ids={first} to {last} must be {seen} to {seen + tokens - 1}, where this cache goes on: it takes one text, "
            "in order and once; another one needs reset() or a new cache"
        )
