"""Shortcuts of a decoder: each is tried, and taken where the decoder gives the same with it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .decoder_attention import DecoderAttention, unrotate
from .decoder_modules import DecoderStack
from .fused_layers import REFERENCE, fuse_layers
from .products import NotDense, projections
from .recording import FARTHEST, TOKENS, Reading, RecordedRun, close
from .rope import rotate
from .skipped_rotations import skip_rotations
from .undo import Undo


def with_shortcuts(reading: Reading, found: DecoderAttention) -> DecoderAttention:
    """The description ``found`` with the shortcuts that the decoder allows."""

    def run(change: Callable[..., None], *args: object, first_place: int = 0, **named: object) -> RecordedRun | None:
        undo = Undo()
        at_1T = first_place + torch.arange(TOKENS, device=reading.ids_1T.device)[None]
        try:
            change(undo, reading.decoder, *args, **named)
            return reading.again(**({"position_ids": at_1T} if first_place else {}))
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
            return None
        finally:
            undo.run()

    if not any(rotation.module for rotation in found.rotations):
        return found
    unturned = run(unrotate, in_halves=True)
    answers = _is_unturned(unturned, reading, found)
    standard = answers and all(rotation.order is None for rotation in found.rotations)
    skips = standard and _is_unturned(run(skip_rotations, lambda *x: REFERENCE), reading, found)

    def fuse(undo: Undo, decoder: DecoderStack) -> None:
        unrotate(undo, decoder, in_halves=True)
        fuse_layers(undo, decoder, lambda *x: REFERENCE)

    fused = run(fuse) if skips else None
    fuses = _is_alike(fused, unturned)
    projects = fuses and fused is not None and _are_products(fused)
    scales = answers and not _is_alike(run(unrotate, in_halves=True, first_place=FARTHEST), unturned)
    found = replace(found, answers_in_halves=answers, skips_rotation=skips, fuses_layers=fuses)
    return replace(found, projects=projects and not scales, scales_queries=scales)


def _are_products(run: RecordedRun) -> bool:
    """Whether queries, keys and values are products of a layer's normed input, in each call of ``run``."""
    for call in run.calls:
        if call.x is None:
            return False
        try:
            made = [product(call.x) for product in projections(call.module)]
        except (NotDense, AttributeError):
            return False
        if not all(close(a, b.transpose(1, 2).flatten(2)) for a, b in zip(made, (call.q, call.k, call.v), strict=True)):
            return False
    return True


def _is_alike(run: RecordedRun | None, first: RecordedRun | None) -> bool:
    """Whether two runs have equal hidden states, queries and keys."""
    if run is None or first is None:
        return False
    pairs = zip(run.calls, first.calls, strict=True)
    return close(run.hidden, first.hidden, 2) and all(close(a.q, b.q) and close(a.k, b.k) for a, b in pairs)


def _is_unturned(run: RecordedRun | None, reading: Reading, found: DecoderAttention) -> bool:
    """Whether queries and keys are those before the rotation."""
    if run is None:
        return False
    for call, a, b in zip(found.calls, run.calls, reading.first.calls, strict=True):
        rotation = found.require_rotations()[call.layer]
        order = list(range(a.q.shape[-1])) if rotation.order is None else list(rotation.order)
        rope = rotation.rope(reading.decoder, reading.config, TOKENS)
        for x, y, turn in ((a.q, b.q, rope.of_queries), (a.k, b.k, rope)):
            if x.shape != y.shape:
                return False
            cos, sin = turn.tables(torch.arange(x.shape[2], device=x.device), x.dtype)
            if not close(rotate(x[..., order], cos, sin), y[..., order]):
                return False
    return close(run.hidden, reading.first.hidden, 2)


def reads_pieces(reading: Reading) -> bool:
    """Whether ids [1, T] can be read in two pieces: the hidden states must equal those of the first run."""
    return close(_in_pieces(reading), reading.first.hidden, 2)


def keeps_apart(reading: Reading) -> bool:
    """Whether a piece of another text between two pieces changes nothing: nearly, since some cards add in any order."""
    return close(_in_pieces(reading, between=True), _in_pieces(reading), 0.1)


def _in_pieces(reading: Reading, *, between: bool = False) -> Tensor:
    """Hidden states [1, T, C] of ids [1, T] that are read in two pieces, with a piece of another text ``between`` them."""
    begun, rest_1T = reading.run(reading.ids_1T[:, :5]), reading.ids_1T[:, 5:]
    if between:
        reading.run(rest_1T.flip(1))
    ended = reading.run(rest_1T, cache=begun.cache)
    return torch.cat((begun.hidden, ended.hidden), 1)
