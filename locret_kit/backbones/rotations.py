"""The rotation of every layer: queries and keys of two readings that differ by it alone (see ``probe``)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .decoder_attention import DecoderAttention, Rotation, frequencies_of, rotaries_of, scaling_of, unrotate
from .recording import ROUNDING, Reading, RecordedCall, close
from .rope import Rope, rotate
from .spec import UnsupportedArchitecture
from .undo import Undo


def rotations_of(reading: Reading, found: DecoderAttention) -> tuple[Rotation, ...]:
    """The rotation of every layer with rows. Raises UnsupportedArchitecture where one is of no known form."""
    rotaries, first, undo = rotaries_of(reading.decoder), reading.first, Undo()
    try:
        unrotate(undo, reading.decoder)
        second = reading.again()
    finally:
        undo.run()
    unknown = "attention of {!r} rotates queries and keys in a way that the kit does not know"
    made: dict[int, Rotation] = {}
    for call, before, after in zip(found.calls, second.calls, first.calls, strict=True):
        # Weights [D] within the attention, by path: possible norms of a head's channels.
        weights = reading.decoder.get_submodule(call.module).named_parameters()
        norms = {f"{call.module}.{path}": weight for path, weight in weights if weight.shape == before.q.shape[-1:]}
        form = rotation_between(rotaries, (before.q, before.k), (after.q, after.k), norms)
        if form is None or made.setdefault(call.layer, form) != form:
            raise UnsupportedArchitecture(unknown.format(call.module))
    if not all(one.module for one in made.values()):
        one = reading.ids_1T[:, :1].expand_as(reading.ids_1T)
        alike = reading.run(one, [torch.zeros_like(out) for out in first.outputs])
        for call, seen in zip(found.calls, alike.calls, strict=True):
            if not made[call.layer].module and _turns_by_itself(seen):
                raise UnsupportedArchitecture(unknown.format(call.module))
    return tuple(made[layer] for layer in range(len(found.spec.layers)))


def rotation_between(
    rotaries: dict[str, nn.Module], before: Sequence[Tensor], after: Sequence[Tensor], norms: Mapping[str, Tensor] = {},
    first: str = "",
) -> Rotation | None:  # fmt: skip
    """The rotation between queries and keys ``[B, heads, T, D]`` before and after RoPE; None if no known form fits.

    Args:
        norms: weights ``[D]`` by path. first: the buffer to try first, since another may be equal in a few tokens.
    """
    pairs = list(zip(before, after, strict=True))
    if all(fits(a, b) for a, b in pairs):
        return Rotation()
    D = before[0].shape[-1]
    for path, module in rotaries.items():
        for buffer in sorted(frequencies_of(module), key=lambda name: name != first):
            inv_freq = getattr(module, buffer).float()
            if inv_freq.dim() != 1 or 2 * len(inv_freq) > D:
                continue
            for order in _orders(D, 2 * len(inv_freq)):
                for sense in (1, -1):
                    rope = Rope(sense * inv_freq, scaling_of(module, buffer))
                    same = order == list(range(D))
                    form = Rotation(path, buffer, sense < 0, None if same else tuple(order))
                    if all(fits(_turned(a, rope, order), b[..., order], 2 * len(inv_freq)) for a, b in pairs):
                        return form
                    found = [_norm_between(a, b, norms, rope, order) for a, b in pairs]
                    if found[0] and found[1]:
                        return replace(form, norms=(found[0], found[1]))
    return None


def fits(a: Tensor, b: Tensor, turned: int = 0) -> bool:
    """Whether queries, keys or states ``[..., T, D]``, whose first ``turned`` channels turn as halves, are equal up to rounding.

    Each number is compared with the largest of the channels that turn together: in trained models others may be far larger.
    """
    size = torch.maximum(a.abs(), b.abs()).amax(-2, keepdim=True).float()
    low, high, rest = size.split((turned // 2, turned // 2, size.shape[-1] - turned), -1)
    pair = torch.maximum(low, high)
    most = torch.cat((pair, pair, rest), -1).clamp(min=1e-3 * float(size.max()))
    return bool(((a.float() - b.float()).abs() <= ROUNDING[b.dtype] * most).all())


def _norm_between(a: Tensor, b: Tensor, norms: Mapping[str, Tensor], rope: Rope, order: list[int]) -> str | None:
    """Path of the norm after the rotation between queries or keys ``[B, heads, T, D]`` a and b; None if none fits."""
    for name, weight_D in norms.items():
        weighted = Rope(rope.inv_freq, weight_R=weight_D[order][: 2 * len(rope.inv_freq)])
        if fits(_turned(a, weighted, order), b[..., order], 2 * len(rope.inv_freq)):
            return name
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
    q_TQD = call.q[0].transpose(0, 1)
    norms_TQ = q_TQD.float().norm(dim=-1)
    # Roundings cancel out in the norm of a head. States of other layers change it, too, but by more.
    kept = (norms_TQ - norms_TQ[0]).abs() <= ROUNDING[q_TQD.dtype] / q_TQD.shape[2] ** 0.5 * norms_TQ[0]
    return bool(kept.all()) and not close(q_TQD, q_TQD[:1].expand_as(q_TQD))
