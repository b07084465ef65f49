"""What a decoder's attention is, measured on the decoder itself: nothing here depends on the name of an architecture.

The decoder reads a few tokens twice. The first time as it is, and its attention calls are recorded. The second time every rotary
module answers for position 0 and attention returns what it returned before, so hidden states are the same and queries and keys
differ by the rotation alone. A layer's rotation is the one of the known forms that turns the second queries and keys into the
first at every position. Windows are read off the mask that each layer is given. What is of no known form is refused.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.masking_utils import eager_mask

from locret_kernels.attend.reference import attend_and_count

from .fused import REFERENCE, fuse_layers, skip_rotations
from .handler import Softmax
from .releases import CACHE, holds_states
from .rope import Rope, rotate
from .spec import (
    AttentionLayer,
    BackboneSpec,
    StateSize,
    UnsupportedArchitecture,
    activation_of,
    decoder_of,
    spec_of,
    text_config,
)
from .states import States
from .undo import Undo, replace_forward

NAME = "locret_probe"
TOKENS = 12
"""Tokens that are read."""
FARTHEST = 1 << 20
"""Position, at most, whose visible tokens say how long a window is."""
IGNORED = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "past_key_values", "cache", "attention_mask"}
)
"""Arguments of attention that say nothing new, tensors or not."""


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates queries and keys."""

    module: str = ""
    """Path of the rotary module below the decoder; empty where nothing is rotated."""
    buffer: str = ""
    """Its inverse frequencies (radians per position)."""
    reversed: bool = False
    """Whether positions turn the other way."""
    order: tuple[int, ...] | None = None
    """Channels of a head in the order in which halves are rotated, from the first one on; None as they come."""

    def __str__(self) -> str:
        return "none" if not self.module else f"{self.module}.{self.buffer}" + (" reversed" if self.reversed else "")


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward."""

    module: str
    """Path of the attention module below the decoder."""
    layer: int
    """Of ``BackboneSpec.layers``: the one whose rows it attends to."""
    shared: bool
    """Whether those are another layer's."""
    plain: bool
    """Whether its softmax has a scaling alone: no cap and no sinks."""


@dataclass(frozen=True)
class DecoderAttention:
    """Attention of a decoder, as measured."""

    spec: BackboneSpec
    calls: tuple[AttentionCall, ...]
    """In the order of a forward."""
    rotations: tuple[Rotation, ...] | str
    """Of every layer with rows; or why they are not known."""
    takes_positions: bool = True
    """Whether a token's place in the text is what its position id says, not the order of the forward."""
    in_pieces: bool = True
    """Whether a text that is read in pieces is what it is in one."""
    skips_rotation: bool = field(default=False, compare=False)
    """Whether the rotation may be left out rather than made one by zero (see ``fused``)."""
    fuses_layers: bool = field(default=False, compare=False)
    """Whether a layer is Llama's: its residuals, norms and MLP can be computed by ``fused``."""

    @property
    def is_plain(self) -> bool:
        """Whether attention is grouped queries over a layer's own rows, and nothing else."""
        return self.unlike_llama is None

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
        if any(rotation.order is not None or rotation.reversed or not rotation.module for rotation in self.rotations):
            return "a rotation other than of halves"
        return None

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

    def ropes(self, model: Any, span: int) -> list[Rope]:
        """One ``Rope`` per layer with rows; layers that rotate alike share theirs. ``span`` (tokens) is the largest position of
        the prompt plus one: it chooses between the short and the long factors of LongRoPE and sets dynamic NTK, once, for the
        whole prompt. Raises UnsupportedArchitecture as ``require_rotations``."""
        decoder, made = decoder_of(model), dict[Rotation, Rope]()
        for rotation in self.require_rotations():
            key = replace(rotation, order=None)
            if key not in made:
                made[key] = _rope(decoder, text_config(model), key, span)
        return [made[replace(rotation, order=None)] for rotation in self.require_rotations()]

    def rotates_by_length(self, model: Any, span: int) -> bool:
        """Whether positions below ``span`` are rotated otherwise in a short text than in a long one."""
        pairs = zip(self.ropes(model, 1), self.ropes(model, span), strict=True)
        return not all(torch.equal(a.inv_freq, b.inv_freq) and a.scaling == b.scaling for a, b in pairs)


def describe(model: Any) -> DecoderAttention:
    """The description of a model's decoder, measured once per class and configuration: less than a second.

    Raises:
        UnsupportedArchitecture: attention that the kit cannot meet, in one sentence.
    """
    decoder, config, ranks = decoder_of(model), text_config(model), getattr(model, "_tp_size", None) or 1
    key = ranks, *_key(decoder, config)
    with _LOCK:
        if key not in _KNOWN:
            try:
                _KNOWN[key] = _measured(decoder, config, ranks)
            except UnsupportedArchitecture as error:
                _KNOWN[key] = str(error)
        known = _KNOWN[key]
    if isinstance(known, str):
        raise UnsupportedArchitecture(known)
    return known


_LOCK = threading.RLock()
_KNOWN: dict[tuple[object, ...], DecoderAttention | str] = {}


def _key(decoder: Any, config: PreTrainedConfig) -> tuple[object, ...]:
    words = {
        name: value for name, value in config.to_dict().items() if not name.startswith(("_", "transformers_version"))
    }
    kinds = tuple(sorted({type(module).__qualname__ for module in decoder.modules()}))
    return type(decoder), kinds, json.dumps(words, sort_keys=True, default=str)


def rotaries_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """Rotary modules of a decoder by their paths."""
    return {
        path: module
        for path, module in decoder.named_modules()
        if "Rotary" in type(module).__name__ and _frequencies(module)
    }


def _frequencies(module: nn.Module) -> list[str]:
    """Names of a rotary module's buffers of inverse frequencies."""
    return [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]


def _rope(decoder: nn.Module, config: PreTrainedConfig, rotation: Rotation, span: int) -> Rope:
    if not rotation.module:
        return Rope(torch.zeros(1, device=next(decoder.parameters()).device))
    module: Any = decoder.get_submodule(rotation.module)
    inv_freq, scaling = getattr(module, rotation.buffer), _scaling(module, rotation.buffer)
    kind = rotation.buffer.removesuffix("inv_freq").removesuffix("_")
    rope_type = getattr(module, "rope_type", "default")
    rope_type = rope_type.get(kind) if isinstance(rope_type, dict) else rope_type
    if rope_type in ("longrope", "dynamic"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        of_type = {"layer_type": kind} if kind else {}
        own = getattr(module, "config", config)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](own, inv_freq.device, seq_len=span, **of_type)
    return Rope(-inv_freq if rotation.reversed else inv_freq, scaling)


def _scaling(module: Any, buffer: str) -> float:
    """Factor of a rotary module on cos and sin."""
    return float(getattr(module, buffer.replace("inv_freq", "attention_scaling"), 1.0))


def unturned(answer: Any) -> Any:
    """What a rotary module answers where no token is turned: cos and sin, or numbers of the complex plane."""
    if isinstance(answer, Tensor) and answer.is_complex():
        return torch.ones_like(answer)
    if isinstance(answer, tuple) and len(answer) == 2:
        return torch.ones_like(answer[0]), torch.zeros_like(answer[1])
    raise UnsupportedArchitecture(f"a rotary module answers {type(answer).__name__}, not cos and sin")


# ---- recording -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    index: int | None
    """Layer of the decoder under which its keys were cached; None where they were not."""
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    softmax: Softmax
    unknown: str | None
    """An argument that the kit does not know."""


class _Indexed(DynamicCache):
    """A cache that says which layer it was asked for last: modules that several layers share have one index for all of them."""

    asked: int | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.asked = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Recording(threading.local):
    """Attention calls of the probe that runs in this thread."""

    calls: list[_Call]
    outputs: list[Tensor]
    replayed: list[Tensor] | None = None
    cache: _Indexed | None = None
    masks: dict[int, Callable[..., Any] | None]


_NOW = _Recording()


def softmax_of(module: Any, q: Tensor, scaling: float | None, named: dict[str, Any]) -> Softmax:
    """The softmax that an attention call asks for."""
    sinks = named.get("s_aux")
    return Softmax(q.shape[-1] ** -0.5 if scaling is None else scaling, named.get("softcap"), sinks)


def unknown_argument(named: dict[str, Any], tokens: int) -> str | None:
    """An argument of an attention call that would change it and that the kit does not know; None without one."""
    for name, value in named.items():
        if isinstance(value, Tensor) and name not in IGNORED and name != "s_aux":
            return name
    return "is_causal=False" if tokens > 1 and named.get("is_causal") is False else None


def _record(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **named: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    number, cache = len(_NOW.calls), _NOW.cache
    index = None if cache is None else cache.asked
    if cache is not None:
        cache.asked = None
    softmax = softmax_of(module, q, scaling, named)
    unknown = unknown_argument(named, q.shape[2])
    _NOW.calls.append(_Call(module, index, q, k, v, attention_mask, softmax, unknown))
    if _NOW.replayed is not None:
        return _NOW.replayed[number], None
    out, _ = attend_and_count(q, k, v, softmax.scaling, cap=softmax.cap, sinks_Q=softmax.sinks_Q)
    out = out.transpose(1, 2).contiguous().to(q.dtype)
    _NOW.outputs.append(out)
    return out, None


def _record_mask(*args: Any, **named: Any) -> Tensor | None:
    mask = eager_mask(*args, **named)
    if mask is not None:
        _NOW.masks[mask.untyped_storage().data_ptr()] = named.get("mask_function")
    return mask


AttentionInterface.register(NAME, _record)
AttentionMaskInterface.register(NAME, _record_mask)


@contextmanager
def _observed(decoder: Any, config: PreTrainedConfig) -> Iterator[None]:
    """Attention of a decoder recorded within the block, whose modules are in evaluation mode."""
    training, before = [module for module in decoder.modules() if module.training], config._attn_implementation
    try:
        for module in training:
            module.training = False
        decoder.set_attn_implementation(NAME)
        if config._attn_implementation != NAME:
            raise UnsupportedArchitecture("its attention is not behind transformers' interface")
        _NOW.masks = {}
        yield
    finally:
        _NOW.calls, _NOW.outputs, _NOW.replayed, _NOW.cache, _NOW.masks = [], [], None, None, {}
        decoder.set_attn_implementation(before)
        for module in training:
            module.training = True


@dataclass(frozen=True)
class _Run:
    calls: list[_Call]
    outputs: list[Tensor]
    hidden: Tensor
    cache: Any


def _run(
    decoder: Any, config: PreTrainedConfig, ids_1T: Tensor, replayed: list[Tensor] | None = None, **more: Tensor
) -> _Run:
    _NOW.calls, _NOW.outputs, _NOW.replayed = [], [], replayed
    _NOW.cache = _Indexed(config=config)
    hidden = decoder(input_ids=ids_1T, use_cache=True, **{CACHE: _NOW.cache}, **more).last_hidden_state
    return _Run(_NOW.calls, _NOW.outputs, hidden, _NOW.cache)


# ---- measuring -----------------------------------------------------------------------------------------------------------


def _measured(decoder: Any, config: PreTrainedConfig, ranks: int) -> DecoderAttention:
    """The description of a decoder, whose heads may be spread over ranks. Raises UnsupportedArchitecture that begins with its
    model type."""
    name = f"model_type={config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{name} is an encoder and a decoder: a bounded cache is for decoders alone")
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedArchitecture(f"{name} has layers of cross-attention, whose keys are an image's")
    if all(weight.is_meta for weight in decoder.parameters()):
        return _assumed(decoder, config)
    try:
        with torch.no_grad(), _observed(decoder, config):
            return _description(decoder, config, ranks)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{name}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[-1][:160]
        raise UnsupportedArchitecture(
            f"{name} does not run over transformers' own cache as a decoder of text does ({type(error).__name__}: {said})"
        ) from error


def _assumed(decoder: Any, config: PreTrainedConfig) -> DecoderAttention:
    """The description of a decoder without weights, which plans and predictions run for its shapes alone: by its
    configuration, and as though it were Llama's in all else."""
    spec, rotary = spec_of(config), getattr(decoder, "rotary_emb", None)
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    buffers = [] if rotary is None else _frequencies(rotary)
    rotations = [
        Rotation("rotary_emb", next((name for name in buffers if name.startswith(types[layer.index])), buffers[0]))
        for layer in spec.layers
        if buffers
    ]
    calls = tuple(
        AttentionCall(f"layers.{layer.index}.self_attn", i, False, True) for i, layer in enumerate(spec.layers)
    )
    return DecoderAttention(
        spec,
        calls,
        tuple(rotations) or "there is no rotary module",
        skips_rotation=bool(buffers),
        fuses_layers=bool(buffers),
    )


def _description(decoder: Any, config: PreTrainedConfig, ranks: int) -> DecoderAttention:
    device = next(decoder.parameters()).device
    words = max(3, min(getattr(config, "vocab_size", None) or 1000, 1000))
    ids_1T = torch.randint(2, words, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    first = _run(decoder, config, ids_1T)
    if not first.calls:
        raise UnsupportedArchitecture("no attention call comes through transformers' interface")
    placed = bool(rotaries_of(decoder)) or _takes_positions(decoder, config, ids_1T, first)
    spec, calls = _layers(decoder, config, first, ranks)
    found = DecoderAttention(spec, calls, "no rotation was looked for", placed)
    found = replace(found, rotations=_rotations(decoder, config, ids_1T, first, found))
    if spec.states:
        sizes = tuple(
            StateSize(name, tuple(state.shape), None if state.dtype == first.hidden.dtype else state.dtype)
            for name, state in States(first.cache).tensors().items()
        )
        found = replace(found, spec=replace(spec, state_sizes=sizes))
        return replace(found, in_pieces=_reads_pieces(decoder, config, ids_1T, first))
    return _with_fusions(decoder, config, ids_1T, first, found)


def _takes_positions(decoder: Any, config: PreTrainedConfig, ids_1T: Tensor, first: _Run) -> bool:
    """Whether a decoder without a rotation goes by position ids.

    Raises:
        UnsupportedArchitecture: told none, it counts otherwise than from 0, as encoders that keep places for padding do:
            ``generate`` and a plain forward differ then.
    """
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return False
    at_1T = torch.arange(TOKENS, device=ids_1T.device)[None]
    hidden, moved = (
        _run(decoder, config, ids_1T, first.outputs, position_ids=at).hidden for at in (at_1T, at_1T.flip(1))
    )
    if not _close(hidden, first.hidden, 2):
        raise UnsupportedArchitecture("it counts the positions of a text otherwise than from 0")
    return not _close(moved, hidden)


def _layers(
    decoder: nn.Module, config: PreTrainedConfig, run: _Run, ranks: int
) -> tuple[BackboneSpec, tuple[AttentionCall, ...]]:
    """Layers with rows, and the calls that read them."""
    paths = {id(module): path for path, module in decoder.named_modules()}
    rows: list[AttentionLayer] = []
    calls: list[AttentionCall] = []
    homes: list[_Call] = []
    for call in run.calls:
        where = f"attention of {paths[id(call.module)]!r}"
        if call.unknown:
            raise UnsupportedArchitecture(f"{where} is given {call.unknown!r}, which the kit does not know")
        _, Q, T, D = call.q.shape
        window, chunked = _window(call, config, where)
        own = call.index is not None
        if own and any(one.index == call.index for one in rows):
            raise UnsupportedArchitecture(f"layer {call.index} calls attention more than once")
        plain = call.softmax.is_plain
        if own:
            if call.k.shape[2] != T or call.v.shape[2] != T:
                raise UnsupportedArchitecture(f"{where} has {T} queries and {call.k.shape[2]} new keys")
            H, size = call.k.shape[1], call.v.shape[-1]
            rows.append(AttentionLayer(ranks * Q, ranks * H, D, size, window, chunked, call.index or 0))
            homes.append(call)
            calls.append(AttentionCall(paths[id(call.module)], len(rows) - 1, False, plain))
            continue
        read = [i for i, home in enumerate(homes) if _same(home.k, call.k) and _same(home.v, call.v)]
        if not read:
            raise UnsupportedArchitecture(f"{where} reads keys that are in no cache")
        home = rows[read[-1]]
        if (window, chunked) != (home.window, home.chunked):
            raise UnsupportedArchitecture(f"{where} reads the keys of a layer with another window")
        calls.append(AttentionCall(paths[id(call.module)], read[-1], True, plain))
    states = holds_states(run.cache)
    shared = any(call.shared for call in calls)
    if len({*(layer.index for layer in rows)}) < len(rows):
        raise UnsupportedArchitecture("two layers cache their keys under one index")
    return BackboneSpec(config.model_type, tuple(rows), activation_of(config), states, shared), tuple(calls)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or bool(torch.equal(a, b)))


def _window(call: _Call, config: PreTrainedConfig, where: str) -> tuple[int | None, bool]:
    """Tokens that a layer's query sees by the mask that it is given, and whether they are a chunk's."""
    if call.mask is None:
        return None, False
    if not isinstance(call.mask, Tensor):
        raise UnsupportedArchitecture(f"{where} is given a mask of the type {type(call.mask).__name__}")
    sees = _NOW.masks.get(call.mask.untyped_storage().data_ptr())
    if sees is None:
        raise UnsupportedArchitecture(f"{where} is given a mask of the model's own")
    zero = torch.zeros((), dtype=torch.long, device=call.mask.device)

    def start(query: int) -> int:
        """The first token that a query sees. It must see all from there on."""
        at = torch.arange(query + 2, device=zero.device)
        seen = torch.as_tensor(sees(zero, zero, zero + query, at)).expand(len(at))
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


# ---- rotations -----------------------------------------------------------------------------------------------------------


def _rotations(
    decoder: Any, config: PreTrainedConfig, ids_1T: Tensor, first: _Run, found: DecoderAttention
) -> tuple[Rotation, ...] | str:
    """The rotation of every layer with rows, or why it is not known."""
    rotaries = rotaries_of(decoder)
    undo = Undo()
    try:
        for module in rotaries.values():
            replace_forward(undo, module, lambda own, *args, **named: unturned(own(*args, **named)))
        second = _run(decoder, config, ids_1T, first.outputs)
    except UnsupportedArchitecture as error:
        return str(error)
    finally:
        undo.run()
    unknown = "attention of {!r} rotates queries and keys in a way that the kit does not know"
    made: dict[int, Rotation] = {}
    for call, before, after in zip(found.calls, second.calls, first.calls, strict=True):
        form = _rotation(rotaries, before, after, with_keys=not call.shared)
        if form is None or made.setdefault(call.layer, form) != form:
            return unknown.format(call.module)
    if not all(one.module for one in made.values()):
        alike = _run(decoder, config, ids_1T[:, :1].expand_as(ids_1T), [torch.zeros_like(out) for out in first.outputs])
        for call, seen in zip(found.calls, alike.calls, strict=True):
            if not made[call.layer].module and _turns_by_itself(seen):
                return unknown.format(call.module)
    return tuple(made[layer] for layer in range(len(found.spec.layers)))


def _rotation(rotaries: dict[str, nn.Module], before: _Call, after: _Call, *, with_keys: bool) -> Rotation | None:
    """The form that turns queries and keys without a rotation into those with it; None for none of the known ones."""
    pairs = [(before.q, after.q), (before.k, after.k)]
    if all(_close(a, b) for a, b in pairs):
        return Rotation()
    D = before.q.shape[-1]
    for path, module in rotaries.items():
        for buffer in _frequencies(module):
            inv_freq = getattr(module, buffer).float()
            if inv_freq.dim() != 1 or 2 * len(inv_freq) > D:
                continue
            for order in _orders(D, 2 * len(inv_freq)):
                for sense in (1, -1):
                    rope = Rope(sense * inv_freq, _scaling(module, buffer))
                    if all(_close(_turned(a, rope, order), b[..., order]) for a, b in pairs):
                        same = order == list(range(D))
                        return Rotation(path, buffer, sense < 0, None if same else tuple(order))
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


ROUNDING = {torch.float64: 2e-5, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Differences within which numbers of a type count as equal, relative to the largest. Norms and rotations of a model in float64
are in float32."""


def _close(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
    """Equal up to the rounding of their type."""
    if a.shape != b.shape:
        return False
    largest = b.float().abs().max().clamp(min=1e-6)
    return bool((a.float() - b.float()).abs().max() <= times * ROUNDING[b.dtype] * largest)


def _turns_by_itself(call: _Call) -> bool:
    """Whether queries of equal tokens, whose attention was nothing, are one vector that is turned with the position."""
    q_TE = call.q[0].transpose(0, 1).flatten(1).float()
    norms_T = q_TE.norm(dim=-1)
    return _close(norms_T, norms_T[:1].expand_as(norms_T)) and not _close(q_TE, q_TE[:1].expand_as(q_TE))


# ---- a layer beside its attention -------------------------------------------------------------------------------------------


def _with_fusions(
    decoder: Any, config: PreTrainedConfig, ids_1T: Tensor, first: _Run, found: DecoderAttention
) -> DecoderAttention:
    """The description with what ``fused`` may do: tried, and compared with the decoder's own."""
    skips = fuses = False
    rotations = () if isinstance(found.rotations, str) else found.rotations
    if all(one.order is None for one in rotations) and any(one.module for one in rotations):
        skips = _runs_alike(decoder, config, ids_1T, first, skip_rotations, rotated=False)
    if skips:
        fuses = _runs_alike(decoder, config, ids_1T, first, fuse_layers, rotated=True)
    return replace(found, skips_rotation=skips, fuses_layers=fuses)


def _runs_alike(
    decoder: Any, config: PreTrainedConfig, ids_1T: Tensor, first: _Run, change: Callable[..., None], *, rotated: bool
) -> bool:
    """Whether a changed decoder gives the same hidden states where attention is what it was, and the same queries."""
    undo = Undo()
    try:
        change(undo, decoder, lambda *x: REFERENCE)
        run = _run(decoder, config, ids_1T, first.outputs)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        return False
    finally:
        undo.run()
    alike = [_close(a.q, b.q) and _close(a.k, b.k) for a, b in zip(run.calls, first.calls, strict=True) if rotated]
    return _close(run.hidden, first.hidden, 2) and all(alike)


# ---- states --------------------------------------------------------------------------------------------------------------


def _reads_pieces(decoder: Any, config: PreTrainedConfig, ids_1T: Tensor, whole: _Run) -> bool:
    """Whether layers with states go on where a piece ended, with more than one token."""
    _NOW.calls, _NOW.outputs, _NOW.replayed, _NOW.cache = [], [], None, _Indexed(config=config)
    hidden = []
    for piece in (ids_1T[:, :5], ids_1T[:, 5:]):
        hidden.append(decoder(input_ids=piece, use_cache=True, **{CACHE: _NOW.cache}).last_hidden_state)
    return _close(torch.cat(hidden, 1), whole.hidden, 2)
