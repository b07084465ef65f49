"""The rotation of every layer, measured: queries and keys of two readings that differ by it alone (see ``probe``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .decoder_attention import DecoderAttention, Rotation, frequencies_of, rotaries_of, scaling_of, unrotate
from .llama import DecoderStack
from .recording import RecordedCall, RecordedRun, close, run_recorded
from .rope import Rope, rotate
from .spec import UnsupportedArchitecture
from .undo import Undo


def rotations_of(
    decoder: DecoderStack, config: PreTrainedConfig, ids_1T: Tensor, first: RecordedRun, found: DecoderAttention
) -> tuple[Rotation, ...] | str:
    """The rotation of every layer with rows, or why it is not known."""
    rotaries = rotaries_of(decoder)
    undo = Undo()
    try:
        unrotate(undo, decoder)
        second = run_recorded(decoder, config, ids_1T, first.outputs)
    except UnsupportedArchitecture as error:
        return str(error)
    finally:
        undo.run()
    unknown = "attention of {!r} rotates queries and keys in a way that the kit does not know"
    made: dict[int, Rotation] = {}
    for call, before, after in zip(found.calls, second.calls, first.calls, strict=True):
        norms = _norms(decoder, call.module, before.q.shape[-1])
        form = _rotation(rotaries, before, after, norms)
        if form is None or made.setdefault(call.layer, form) != form:
            return unknown.format(call.module)
    if not all(one.module for one in made.values()):
        alike = run_recorded(
            decoder, config, ids_1T[:, :1].expand_as(ids_1T), [torch.zeros_like(out) for out in first.outputs]
        )
        for call, seen in zip(found.calls, alike.calls, strict=True):
            if not made[call.layer].module and _turns_by_itself(seen):
                return unknown.format(call.module)
    return tuple(made[layer] for layer in range(len(found.spec.layers)))


def _norms(decoder: nn.Module, attention: str, D: int) -> dict[str, Tensor]:
    """Weights below a module of attention that could be of a norm of a head's ``D`` channels, by their paths."""
    weights = decoder.get_submodule(attention).named_parameters()
    return {f"{attention}.{path}": weight for path, weight in weights if weight.shape == (D,)}


def _rotation(
    rotaries: dict[str, nn.Module], before: RecordedCall, after: RecordedCall, norms: dict[str, Tensor]
) -> Rotation | None:
    """The form that turns queries and keys without a rotation into those with it; None for none of the known ones. ``norms``:
    see ``_norms``."""
    pairs = [(before.q, after.q), (before.k, after.k)]
    if all(close(a, b) for a, b in pairs):
        return Rotation()
    D = before.q.shape[-1]
    for path, module in rotaries.items():
        for buffer in frequencies_of(module):
            inv_freq = getattr(module, buffer).float()
            if inv_freq.dim() != 1 or 2 * len(inv_freq) > D:
                continue
            for order in _orders(D, 2 * len(inv_freq)):
                for sense in (1, -1):
                    rope = Rope(sense * inv_freq, scaling_of(module, buffer))
                    same = order == list(range(D))
                    form = Rotation(path, buffer, sense < 0, None if same else tuple(order))
                    if all(close(_turned(a, rope, order), b[..., order]) for a, b in pairs):
                        return form
                    weighted = {
                        name: Rope(rope.inv_freq, weight_R=weight[order][: 2 * len(inv_freq)])
                        for name, weight in norms.items()
                    }
                    found = [
                        next((n for n, w in weighted.items() if close(_turned(a, w, order), b[..., order])), None)
                        for a, b in pairs
                    ]
                    if found[0] and found[1]:
                        return replace(form, norms=(found[0], found[1]))
    return None


def _orders(D: int, R: int) -> Iterator[list[int]]:
    """Orders of a head's ``D`` channels that bring ``R`` rotated ones, halves or neighbours, first or last, to the front as
    halves."""
    for start in (0, D - R) if R < D else (0,):
        inner, rest = list(range(start, start + R)), [*range(start), *range(start + R, D)]
        yield inner + rest
        yield inner[0::2] + inner[1::2] + rest


def _turned(x_BHTD: Tensor, rope: Rope, order: list[int]) -> Tensor:
    cos, sin = rope.tables(torch.arange(x_BHTD.shape[2], device=x_BHTD.device), x_BHTD.dtype)
    return rotate(x_BHTD[..., order], cos, sin)


def _turns_by_itself(call: RecordedCall) -> bool:
    """Whether queries of equal tokens, whose attention was nothing, are one vector that is turned with the position."""
    q_TE = call.q[0].transpose(0, 1).flatten(1).float()
    norms_T = q_TE.norm(dim=-1)
    return close(norms_T, norms_T[:1].expand_as(norms_T)) and not close(q_TE, q_TE[:1].expand_as(q_TE))
