"""Attention of a decoder: its measured description (see ``probe``), and its rotations."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .decoder_modules import decoder_of, device_of
from .rope import Rope
from .spec import BackboneSpec, UnsupportedArchitecture, text_config
from .undo import Undo, replace_forward

Turn = Tensor | tuple[Tensor, Tensor]
"""Answer of a rotary module: cos and sin, or numbers of the complex plane."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of a layer's queries and keys."""

    module: str = ""
    """Path of the rotary module below the decoder; empty where nothing is rotated."""
    buffer: str = ""
    """Name of the buffer of inverse frequencies (radians per position)."""
    reversed: bool = False
    """Whether positions turn the other way."""
    order: tuple[int, ...] | None = None
    """Channels of a head, ordered for a rotation of halves, the rotated ones first. None keeps the order."""
    norms: tuple[str, str] | None = None
    """Paths of the weights of norms that come after the rotation, of queries and of keys; None without them."""

    def rope(self, decoder: nn.Module, config: PreTrainedConfig, span: int) -> Rope:
        """The rotation of a text whose positions are below ``span``."""
        if not self.module:
            return Rope(torch.zeros(1, dtype=torch.float32, device=getattr(decoder, "device", None)))
        module = decoder.get_submodule(self.module)
        inv_freq, scaling = getattr(module, self.buffer), scaling_of(module, self.buffer)
        kind = self.buffer.removesuffix("inv_freq").removesuffix("_")
        rope_type = getattr(module, "rope_type", "default")
        rope_type = rope_type.get(kind) if isinstance(rope_type, dict) else rope_type
        own = getattr(module, "config", config)
        # Hunyuan's alpha is fixed, and older releases of transformers call that dynamic.
        if rope_type in ("longrope", "dynamic") and not (own.rope_parameters or {}).get("alpha"):
            of_type = {"layer_type": kind} if kind else {}
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](own, inv_freq.device, seq_len=span, **of_type)
        inv_freq = -inv_freq if self.reversed else inv_freq
        if self.norms is None:
            return Rope(inv_freq, scaling)
        # A norm takes the factor out again.
        weights_D = [decoder.get_parameter(path).detach() for path in self.norms]
        ordered_D = weights_D if self.order is None else [weight_D[list(self.order)] for weight_D in weights_D]
        of_queries, of_keys = (Rope(inv_freq, weight_R=weight_D[: 2 * len(inv_freq)]) for weight_D in ordered_D)
        return replace(of_keys, queries=of_queries)

    @property
    def shared(self) -> Self:
        """Rotation without the order of channels. Layers that rotate alike share it, unless they have norms of their own."""
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
    """Whether it reads the rows of another layer."""
    plain: bool
    """Whether its softmax has a scaling alone: no cap and no sinks."""


KnownCalls = dict[nn.Module, list[tuple[AttentionCall, Tensor | None]]]
"""Calls of each attention module, in the order of a forward, each with the order ``[D]`` of its channels, or None."""


class Calls:
    """Attention calls of one forward. The order of calls tells apart the layers that share a module."""

    def __init__(self, known: KnownCalls) -> None:
        """Count from the first of ``known`` on."""
        self._known, self._count = known, Counter[nn.Module]()

    def next(self, module: nn.Module) -> tuple[AttentionCall, Tensor | None]:
        """The current call of a module, and the order of channels [D] for rotating its queries and keys; None keeps the order."""
        known, name = self._known.get(module, []), type(module).__name__
        if len(known) == 1:
            return known[0]
        if (count := self._count[module]) >= len(known):
            raise UnsupportedArchitecture(f"{name} calls attention more often than when it was attached")
        self._count[module] += 1
        return known[count]


@dataclass(frozen=True)
class DecoderAttention:
    """Attention of a decoder, as measured."""

    spec: BackboneSpec
    calls: tuple[AttentionCall, ...]
    """Attention calls, in the order of a forward."""
    rotations: tuple[Rotation, ...] = ()
    """Rotation of every layer with rows; empty where it is not known."""
    unknown_rotation: str = ""
    """Why rotations are not known."""
    takes_positions: bool = True
    """Whether a token's place in the text is its position id, not its order in the forward."""
    places: int | None = None
    """Positions that it looks up in a table, learned ones or GPT-J's; None where it computes them."""
    in_pieces: bool = True
    """Whether reading a text in pieces gives the same hidden states as reading it in one."""
    answers_in_halves: bool = field(default=False, compare=False)
    """Whether rotary modules answer cos and sin ``[B, T, R]`` of every channel that they turn, as Llama's."""
    skips_rotation: bool = field(default=False, compare=False)
    """Whether the rotation may be left out rather than made one by zero (see ``skipped_rotations``)."""
    fuses_layers: bool = field(default=False, compare=False)
    """Whether a layer is Llama's: its residuals, norms and MLP can be computed by ``fused_layers``."""
    projects: bool = field(default=False, compare=False)
    """Whether queries, keys and values of such layers, before the rotation, are products of the layer's normed input."""
    scales_queries: bool = field(default=False, compare=False)
    """Whether queries are scaled by their positions, besides the rotation (Ministral 3)."""

    @property
    def unlike_llama(self) -> str | None:
        """The first difference of the attention from Llama's with windows; None without one."""
        spec = self.spec
        differences = {
            f"{len(spec.states)} layers hold a state": bool(spec.states),
            "layers share keys and values": spec.shared,
            "attention has sinks or a cap on its logits": not all(call.plain for call in self.calls),
            "sizes differ from layer to layer, or between keys and values": not spec.is_uniform,
            "attention is chunked": any(layer.chunked for layer in spec.layers),
            self.unknown_rotation: not self.rotations,
            "norms of queries and keys come after the rotation": self.has_weighted_rotations,
            "a rotation other than of halves": any(r.order or r.reversed or not r.module for r in self.rotations),
        }
        return next((words for words, found in differences.items() if found), None)

    def devices(self, model: PreTrainedModel) -> list[torch.device]:
        """Device of every layer with rows, of a model that may be spread over several; its own where it has no modules."""
        modules = dict(decoder_of(model).named_modules())
        paths = {call.layer: call.module for call in self.calls if not call.shared}
        layers = [modules.get(paths[layer]) for layer in range(self.spec.n_layers)]
        return [(None if layer is None else device_of(layer)) or model.device for layer in layers]

    @property
    def has_weighted_rotations(self) -> bool:
        """Whether norms with a weight come after the rotation in some layers, which the definitions of kernels alone know."""
        return any(rotation.norms for rotation in self.rotations)

    @property
    def packs_texts(self) -> bool:
        """Whether the new tokens of several texts may stand end to end in one forward."""
        return self.takes_positions and not self.spec.states and not self.spec.shared

    def check_places(self, tokens: int) -> None:
        """Raise ValueError for a text of more ``tokens`` than there are positions in the decoder's table."""
        if self.places is not None and tokens > self.places:
            raise ValueError(
                f"model_type={self.spec.model_type!r}: a text of {tokens} tokens must have at most {self.places}, the positions "
                "in the model's table"
            )

    def require_rotations(self) -> tuple[Rotation, ...]:
        """The rotations. Raises UnsupportedArchitecture where they are not known."""
        if not self.rotations:
            raise UnsupportedArchitecture(
                f"model_type={self.spec.model_type!r}: {self.unknown_rotation}, so retaining heads and compact positions "
                "cannot run; a policy without heads, such as snapkv, runs at original positions"
            )
        return self.rotations

    def ropes(self, model: PreTrainedModel, span: int) -> list[Rope]:
        """One ``Rope`` per layer with rows; layers that rotate alike share theirs. ``span`` (tokens) is the largest position of
        the prompt plus one: it chooses between the short and the long factors of LongRoPE and sets dynamic NTK, once, for the
        whole prompt. Raises UnsupportedArchitecture where rotations are not known."""
        decoder, made = decoder_of(model), dict[Rotation, Rope]()
        for rotation in self.require_rotations():
            if rotation.shared not in made:
                made[rotation.shared] = rotation.shared.rope(decoder, text_config(model), span)
        return [made[rotation.shared] for rotation in self.require_rotations()]


class Described:
    """A stand-in for a model that runs elsewhere, with known attention. ``probe.describe`` returns its ``description``."""

    description: DecoderAttention


def rotaries_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """Rotary modules of a decoder by their paths."""
    rotary = {path: module for path, module in decoder.named_modules() if "Rotary" in type(module).__name__}
    return {path: module for path, module in rotary.items() if frequencies_of(module)}


def frequencies_of(module: nn.Module) -> list[str]:
    """Names of a rotary module's buffers of inverse frequencies."""
    return [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]


def scaling_of(module: nn.Module, buffer: str) -> float:
    """Factor of a rotary module on cos and sin."""
    return float(getattr(module, buffer.replace("inv_freq", "attention_scaling"), 1.0))


def unrotate(undo: Undo, decoder: nn.Module, when: Callable[[], bool] | None = None, in_halves: bool = False) -> None:
    """Let the rotary modules of a decoder turn no token while ``when``, until ``undo``: cos = 1 and sin = 0.

    Args:
        in_halves: see ``DecoderAttention``. The modules' own forward is not called then: LongRoPE's makes the host wait for the
            largest position.
    """

    def answer(rotary: nn.Module, forward: Callable[..., Turn], *args: Any, **named: Any) -> Turn:
        if when is not None and not when():
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
    """An answer that turns no token, in the form of ``answer``."""
    if isinstance(answer, Tensor) and answer.is_complex():
        return torch.ones_like(answer)
    if isinstance(answer, tuple) and len(answer) == 2:
        return torch.ones_like(answer[0]), torch.zeros_like(answer[1])
    raise UnsupportedArchitecture(f"a rotary module answers {type(answer).__name__}, not cos and sin")
