"""The rotation of every layer, measured: queries and keys of two readings that differ by it alone (see ``probe``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .decoder_attention import DecoderAttention, Rotation, frequencies_of, rotaries_of, scaling_of, unrotate
from .recording import NOW, RecordedCall, RecordedRun, close, run_recorded, storage_of
from .rope import Rope, rotate
from .spec import DecoderStack, UnsupportedArchitecture
from .wrapped import Undo


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


# ---- windows of attention, read off the mask that a layer is given --------------------------------------------------


FARTHEST = 1 << 20
"""Position, at most, whose visible tokens say how long a window is."""


def window_of(call: RecordedCall, config: PreTrainedConfig, where: str) -> tuple[int | None, bool]:
    """Tokens that a layer's query sees by the mask that it is given, and whether they are a chunk's."""
    if call.mask is None:
        return None, False
    if not isinstance(call.mask, Tensor):
        raise UnsupportedArchitecture(f"{where} is given a mask of the type {type(call.mask).__name__}")
    sees = NOW.masks.get(storage_of(call.mask))
    if sees is None:
        raise UnsupportedArchitecture(f"{where} is given a mask of the model's own")
    zero = torch.zeros((), dtype=torch.long, device="cpu" if call.mask.is_meta else call.mask.device)

    def start(query: int) -> int:
        """The first token that a query sees. It must see all from there on."""
        at = torch.arange(query + 2, device=zero.device)
        seen = torch.as_tensor(sees(zero, zero, zero + query, at), device=zero.device).expand(len(at))
        first = int(seen.long().argmax())
        if bool(seen[query + 1]) or not bool(seen[first : query + 1].all()):
            raise UnsupportedArchitecture(f"{where} sees tokens that are no stretch up to its own")
        return first

    last = min(getattr(config, "max_position_embeddings", None) or FARTHEST, FARTHEST) - 1
    # A window as long as the trained context (Phi-3-mini-128K: 262,144) never hides a token: full attention.
    if (at := start(last)) == 0:
        return None, False
    if all(start(last - n) == at - n for n in (1, 2, 5) if at >= n):
        return last - at + 1, False
    end = next((n for n in range(1, 4) if start(last - n) != at), 0)
    first = at if not end else start(last - 4)  # the query was within a few tokens of a chunk's beginning
    size = first - start(first - 1)
    if any(start(query) != query - query % size for query in (last, first, first - 1, first + size // 2)):
        raise UnsupportedArchitecture(f"{where} sees tokens that are neither a window nor a chunk")
    return size, True
