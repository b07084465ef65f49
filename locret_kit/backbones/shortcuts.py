"""Shortcuts that a decoder allows: each is tried, and taken where the decoder gives what it gives by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .decoder_attention import DecoderAttention, unrotate
from .fused import REFERENCE, fuse_layers, skip_rotations
from .handler import LayerOperations
from .llama import DecoderStack
from .recording import NOW, IndexedCache, RecordedRun, close, run_recorded
from .releases import CACHE
from .rope import rotate
from .undo import Undo
from .windows import FARTHEST


def with_shortcuts(
    decoder: DecoderStack, config: PreTrainedConfig, ids_1T: Tensor, first: RecordedRun, found: DecoderAttention
) -> DecoderAttention:
    """The description of a decoder with the shortcuts that it allows."""

    def reference(*x: Tensor) -> LayerOperations:
        return REFERENCE

    def run(change: Callable[..., None], *args: object, first_place: int = 0, **named: object) -> RecordedRun | None:
        undo = Undo()
        at_T = first_place + torch.arange(ids_1T.shape[1], device=ids_1T.device)
        try:
            change(undo, decoder, *args, **named)
            return run_recorded(
                decoder, config, ids_1T, first.outputs, **({"position_ids": at_T[None]} if first_place else {})
            )
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
            return None
        finally:
            undo.run()

    rotations = () if isinstance(found.rotations, str) else found.rotations
    if not any(rotation.module for rotation in rotations):
        return found
    unturned = run(unrotate, in_halves=True)
    answers = _is_unturned(unturned, first, decoder, found)
    standard = all(rotation.order is None for rotation in rotations)
    skips = standard and answers and _is_unturned(run(skip_rotations, reference), first, decoder, found)
    fuses = skips and _is_alike(run(fuse_layers, reference), first)
    scales = fuses and not _is_alike(run(unrotate, in_halves=True, first_place=FARTHEST), unturned)
    return replace(found, answers_in_halves=answers, skips_rotation=skips, fuses_layers=fuses, scales_queries=scales)


def _is_alike(run: RecordedRun | None, first: RecordedRun | None) -> bool:
    """Whether hidden states, queries and keys are what they were; attention gave what it had given."""
    if run is None or first is None:
        return False
    pairs = zip(run.calls, first.calls, strict=True)
    return close(run.hidden, first.hidden, 2) and all(close(a.q, b.q) and close(a.k, b.k) for a, b in pairs)


def _is_unturned(run: RecordedRun | None, first: RecordedRun, decoder: DecoderStack, found: DecoderAttention) -> bool:
    """Whether queries and keys are those before the rotation."""
    if run is None:
        return False
    for call, a, b in zip(found.calls, run.calls, first.calls, strict=True):
        rotation = found.require_rotations()[call.layer]
        order = list(range(a.q.shape[-1])) if rotation.order is None else list(rotation.order)
        rope = rotation.measured(decoder)
        for x, y, turn in ((a.q, b.q, rope.of_queries), (a.k, b.k, rope)):
            if x.shape != y.shape:
                return False
            cos, sin = turn.tables(torch.arange(x.shape[2], device=x.device), x.dtype)
            if not close(rotate(x[..., order], cos, sin), y[..., order]):
                return False
    return close(run.hidden, first.hidden, 2)


def reads_pieces(decoder: DecoderStack, config: PreTrainedConfig, ids_1T: Tensor, whole: RecordedRun) -> bool:
    """Whether layers with states go on where a piece ended, with more than one token."""
    cache = IndexedCache(config=config)
    hidden = [_read(decoder, piece, cache) for piece in (ids_1T[:, :5], ids_1T[:, 5:])]
    return close(torch.cat(hidden, 1), whole.hidden, 2)


def keeps_texts_apart(decoder: DecoderStack, config: PreTrainedConfig, ids_1T: Tensor, whole: RecordedRun) -> bool:
    """Whether a text goes on where it was after a piece of another one."""
    cache, other = IndexedCache(config=config), IndexedCache(config=config)
    begun = _read(decoder, ids_1T[:, :5], cache)
    _read(decoder, ids_1T[:, 5:].flip(1), other)
    return close(torch.cat((begun, _read(decoder, ids_1T[:, 5:], cache)), 1), whole.hidden, 2)


def _read(decoder: DecoderStack, ids_1T: Tensor, cache: IndexedCache) -> Tensor:
    """Final hidden states of more tokens of a text."""
    NOW.calls, NOW.outputs, NOW.replayed, NOW.cache = [], [], None, cache
    hidden: Tensor = decoder(input_ids=ids_1T, use_cache=True, **{CACHE: cache}).last_hidden_state
    return hidden
