"""Queries, keys and values in another engine's layers, as seen in forwards of a few tokens. That engine runs the
model, so its layers are measured, not transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig

from ..backbones.decoder_attention import AttentionCall, DecoderAttention, Rotation, rotaries_of
from ..backbones.recording import close, rotation_between
from ..backbones.spec import AttentionLayer, UnsupportedArchitecture

Heads = tuple[Tensor, Tensor]
"""Queries and keys ``[T, heads, D]``."""


class SeenLayer(NamedTuple):
    """Attention of one layer in forwards of the same tokens, from position 0 on."""

    name: str
    layer: int
    """Number of the decoder's layer."""
    sizes: tuple[int, int, int, int]
    """Heads of queries, heads of keys and values, channels of a key and of a value."""
    window: int | None
    plain: bool
    """Whether its softmax has a scaling alone."""
    shared: bool
    """Whether it reads another layer's rows."""
    came: Heads
    """Rotation for attention where nothing is rotated."""
    moved: Heads
    """The arguments of attention for the same tokens at other positions, without rotation."""
    turned: Heads
    """The arguments of attention where queries and keys are rotated."""


def described(
    assumed: DecoderAttention, config: PretrainedConfig, rotaries: nn.Module, seen: Sequence[SeenLayer]
) -> DecoderAttention:
    """The description of a decoder whose forward was seen.

    Args:
        assumed: by the configuration. rotaries: a module with transformers' rotary embeddings, whose frequencies the kit reads.

    Raises:
        UnsupportedArchitecture: a layer whose attention the kit does not know, in one sentence.
    """
    longest = getattr(config, "max_position_embeddings", None)
    layers, calls, rotations = [], [], []
    for number, one in enumerate(seen):
        # A window as long as the trained context never hides a token.
        window = None if longest and one.window and one.window >= longest else one.window
        layers.append(AttentionLayer(*one.sizes, window, index=one.layer))
        calls.append(AttentionCall(one.name, number, one.shared, one.plain))
        if not one.shared:
            rotations.append(_rotation(one, rotaries, _named(assumed, one.layer)))
    spec = replace(assumed.spec, layers=tuple(layers), shared=any(one.shared for one in seen))
    return DecoderAttention(spec, tuple(calls), tuple(rotations))


def _named(assumed: DecoderAttention, index: int) -> Rotation:
    """The rotation that the configuration names for a layer of the decoder."""
    if isinstance(assumed.rotations, str):
        return Rotation()
    pairs = zip(assumed.spec.layers, assumed.rotations, strict=True)
    return next((rotation for layer, rotation in pairs if layer.index == index), Rotation())


def _rotation(one: SeenLayer, rotaries: nn.Module, named: Rotation) -> Rotation:
    """The rotation of a layer by transformers' frequencies, ``named`` ones first."""
    if any(_turns(a, b) for a, b in zip(one.came, one.moved, strict=True)):
        raise UnsupportedArchitecture(f"{one.name} turns queries or keys by a rotation that cannot be left out")
    before, after = ([x.transpose(0, 1)[None] for x in pair] for pair in (one.came, one.turned))
    known = rotaries_of(rotaries)
    if (found := rotation_between(known, before, after, first=named.buffer)) is not None:
        return found
    # Chosen anew for each text by its length; vLLM chooses once, for the longest.
    kinds = getattr(known.get(named.module), "rope_type", None)
    if named.module and {"longrope", "dynamic"} & {*(kinds.values() if isinstance(kinds, dict) else [kinds])}:
        return named
    raise UnsupportedArchitecture(
        f"{one.name} rotates otherwise than transformers' frequencies of this configuration say"
    )


def _turns(a: Tensor, b: Tensor) -> bool:
    """Whether vectors ``[..., D]`` of one shape keep their lengths but not their directions."""
    return close(a.norm(dim=-1), b.norm(dim=-1)) and not close(a, b)
