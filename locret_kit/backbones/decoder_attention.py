"""Attention of a decoder in words and numbers: what ``probe`` has measured, and the rotations that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .rope import Rope
from .spec import BackboneSpec, UnsupportedArchitecture, decoder_of, text_config
from .wrapped import Undo, replace_forward

Turn = Tensor | tuple[Tensor, Tensor]
"""Answer of a rotary module: cos and sin, or numbers of the complex plane."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of a layer's queries and keys."""

    module: str = ""
    """Path of the rotary module below the decoder; empty where nothing is rotated."""
    buffer: str = ""
    """Its inverse frequencies (radians per position)."""
    reversed: bool = False
    """Whether positions turn the other way."""
    order: tuple[int, ...] | None = None
    """Channels of a head in the order in which halves are rotated, from the first one on; None as they come."""
    norms: tuple[str, str] | None = None
    """Paths of the weights of norms that come after the rotation, of queries and of keys; None without them."""

    def measured(self, decoder: nn.Module) -> Rope:
        """The rotation of a text of a few tokens."""
        if not self.module:
            return Rope(torch.zeros(1, dtype=torch.float32, device=next(decoder.parameters()).device))
        module = decoder.get_submodule(self.module)
        inv_freq: Tensor = getattr(module, self.buffer).float()
        return self.rope(decoder, inv_freq, scaling_of(module, self.buffer))

    def rope(self, decoder: nn.Module, inv_freq: Tensor, scaling: float) -> Rope:
        """The rotation by these frequencies (radians per position) and this factor."""
        inv_freq = -inv_freq if self.reversed else inv_freq
        if self.norms is None:
            return Rope(inv_freq, scaling)
        # A norm takes the factor out again.
        of_queries, of_keys = (
            Rope(inv_freq, weight_R=self._rotated(decoder.get_parameter(path), 2 * len(inv_freq)))
            for path in self.norms
        )
        return replace(of_keys, queries=of_queries)

    def _rotated(self, weight_D: Tensor, R: int) -> Tensor:
        """The numbers of a head's rotated channels, in their order."""
        return (weight_D if self.order is None else weight_D[list(self.order)])[:R].detach()

    @property
    def shared(self) -> Rotation:
        """The same without the order of channels: one object for layers that rotate alike, but for norms of their own."""
        return self if self.norms else replace(self, order=None)

    def __str__(self) -> str:
        return "none" if not self.module else f"{self.module}.{self.buffer}" + (" reversed" if self.reversed else "")


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward."""

    module: str
    """Path of the attention module below the decoder."""
    layer: int
    """Number in ``BackboneSpec.layers`` of the layer whose rows it attends to."""
    shared: bool
    """Whether those are another layer's."""
    plain: bool
    """Whether its softmax has a scaling alone: no cap and no sinks."""


class Calls:
    """Attention calls of one forward. Modules that several layers share are told apart by the order of their calls."""

    def __init__(self, known: dict[nn.Module, list[tuple[AttentionCall, Tensor | None]]]) -> None:
        self._known = known
        self._count: dict[nn.Module, int] = {}

    def next(self, module: nn.Module) -> tuple[AttentionCall, Tensor | None]:
        """The call that a module makes now, and the order of channels in which its queries and keys are rotated."""
        known = self._known.get(module, [])
        if len(known) == 1:
            return known[0]
        count = self._count.get(module, 0)
        if count >= len(known):
            raise UnsupportedArchitecture(
                f"{type(module).__name__} calls attention more often than when it was attached"
            )
        self._count[module] = count + 1
        return known[count]


@dataclass(frozen=True)
class DecoderAttention:
    """Attention of a decoder, as measured."""

    spec: BackboneSpec
    calls: tuple[AttentionCall, ...]
    """In the order of a forward."""
    rotations: tuple[Rotation, ...] | str
    """One for every layer with rows; or the reason why they are not known."""
    takes_positions: bool = True
    """Whether a token's place in the text is what its position id says, not the order of the forward."""
    in_pieces: bool = True
    """Whether a text that is read in pieces is what it is in one."""
    answers_in_halves: bool = field(default=False, compare=False)
    """Whether rotary modules answer cos and sin ``[B, T, R]`` of every channel that they turn, as Llama's."""
    skips_rotation: bool = field(default=False, compare=False)
    """Whether the rotation may be left out rather than made one by zero (see ``patches``)."""
    fuses_layers: bool = field(default=False, compare=False)
    """Whether a layer is Llama's: its residuals, norms and MLP can be computed by ``patches``."""
    scales_queries: bool = field(default=False, compare=False)
    """Whether queries of such layers are scaled by their positions, beside the rotation (Ministral 3)."""

    @property
    def unlike_llama(self) -> str | None:
        """The first thing by which attention differs from Llama's with windows; None where it does not."""
        spec = self.spec
        if spec.states:
            return f"{len(spec.states)} layers hold a state"
        if spec.shared:
            return "layers share keys and values"
        if not all(call.plain for call in self.calls):
            return "attention has sinks or a cap on its logits"
        if not spec.is_uniform:
            return "sizes differ from layer to layer, or between keys and values"
        if any(layer.chunked for layer in spec.layers):
            return "attention is chunked"
        if isinstance(self.rotations, str):
            return self.rotations
        if self.has_weighted_rotations:
            return "norms of queries and keys come after the rotation"
        if any(rotation.order is not None or rotation.reversed or not rotation.module for rotation in self.rotations):
            return "a rotation other than of halves"
        return None

    @property
    def has_weighted_rotations(self) -> bool:
        """Whether norms with a weight come after the rotation in some layers, which the definitions of kernels alone know."""
        return not isinstance(self.rotations, str) and any(rotation.norms for rotation in self.rotations)

    @property
    def packs_texts(self) -> bool:
        """Whether the new tokens of several texts may stand end to end in one forward."""
        return self.takes_positions and not self.spec.states and not self.spec.shared

    def require_rotations(self) -> tuple[Rotation, ...]:
        """The rotations. Raises UnsupportedArchitecture where they are not known."""
        if isinstance(self.rotations, str):
            raise UnsupportedArchitecture(
                f"model_type={self.spec.model_type!r}: {self.rotations}, so retaining heads and compact positions cannot run; "
                "a policy without heads, such as snapkv, runs at original positions"
            )
        return self.rotations

    def ropes(self, model: PreTrainedModel, span: int) -> list[Rope]:
        """One ``Rope`` per layer with rows; layers that rotate alike share theirs. ``span`` (tokens) is the largest position of
        the prompt plus one: it chooses between the short and the long factors of LongRoPE and sets dynamic NTK, once, for the
        whole prompt. Raises UnsupportedArchitecture as ``require_rotations``."""
        decoder, made = decoder_of(model), dict[Rotation, Rope]()
        for rotation in self.require_rotations():
            if rotation.shared not in made:
                made[rotation.shared] = _rope(decoder, text_config(model), rotation.shared, span)
        return [made[rotation.shared] for rotation in self.require_rotations()]

    def rotates_by_length(self, model: PreTrainedModel, span: int) -> bool:
        """Whether positions below ``span`` are rotated otherwise in a short text than in a long one."""
        return not same_rotation(self.ropes(model, 1), self.ropes(model, span))


class Described:
    """A stand-in for a model whose attention is known, and runs elsewhere. ``probe.describe`` takes its word for it."""

    description: DecoderAttention


def same_rotation(some: Sequence[Rope], others: Sequence[Rope]) -> bool:
    """Whether layers rotate by the same frequencies and factors."""
    pairs = zip(some, others, strict=True)
    return all(a is b or (a.scaling == b.scaling and torch.equal(a.inv_freq, b.inv_freq)) for a, b in pairs)


def rotaries_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """Rotary modules of a decoder by their paths."""
    return {
        path: module
        for path, module in decoder.named_modules()
        if "Rotary" in type(module).__name__ and frequencies_of(module)
    }


def frequencies_of(module: nn.Module) -> list[str]:
    """Names of a rotary module's buffers of inverse frequencies."""
    return [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]


def _rope(decoder: nn.Module, config: PreTrainedConfig, rotation: Rotation, span: int) -> Rope:
    if not rotation.module:
        return Rope(torch.zeros(1, dtype=torch.float32, device=next(decoder.parameters()).device))
    module = decoder.get_submodule(rotation.module)
    inv_freq, scaling = getattr(module, rotation.buffer), scaling_of(module, rotation.buffer)
    kind = rotation.buffer.removesuffix("inv_freq").removesuffix("_")
    rope_type = getattr(module, "rope_type", "default")
    rope_type = rope_type.get(kind) if isinstance(rope_type, dict) else rope_type
    if rope_type in ("longrope", "dynamic"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        of_type = {"layer_type": kind} if kind else {}
        own = getattr(module, "config", config)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](own, inv_freq.device, seq_len=span, **of_type)
    return rotation.rope(decoder, inv_freq, scaling)


def scaling_of(module: nn.Module, buffer: str) -> float:
    """Factor of a rotary module on cos and sin."""
    return float(getattr(module, buffer.replace("inv_freq", "attention_scaling"), 1.0))


def unrotate(
    undo: Undo, decoder: nn.Module, when: Callable[[], bool] = lambda: True, *, in_halves: bool = False
) -> None:
    """Let the rotary modules of a decoder turn no token while ``when``, until ``undo``: cos = 1 and sin = 0.

    Args:
        in_halves: as in ``DecoderAttention``. Their own forward is not called then: of LongRoPE it makes the host wait for the
            largest position.
    """

    def answer(rotary: nn.Module, forward: Callable[..., Turn], *args: Any, **named: Any) -> Turn:
        if not when():
            return forward(*args, **named)
        if not in_halves:
            return _unturned(forward(*args, **named))
        x, position_ids, *kind = (*args, *named.values())
        if position_ids.dim() != 2:  # places in several dimensions
            return _unturned(forward(*args, **named))
        inv_freq = getattr(rotary, "_".join((*kind, "inv_freq")))  # a layer's type, where types differ
        cos_BTR = x.new_ones(*position_ids.shape, 2 * inv_freq.shape[-1])
        return cos_BTR, torch.zeros_like(cos_BTR)

    for rotary in rotaries_of(decoder).values():
        replace_forward(undo, rotary, partial(answer, rotary))


def _unturned(answer: Turn) -> Turn:
    """An answer to the same tokens, none of which is turned."""
    if isinstance(answer, Tensor) and answer.is_complex():
        return torch.ones_like(answer)
    if isinstance(answer, tuple) and len(answer) == 2:
        return torch.ones_like(answer[0]), torch.zeros_like(answer[1])
    raise UnsupportedArchitecture(f"a rotary module answers {type(answer).__name__}, not cos and sin")
