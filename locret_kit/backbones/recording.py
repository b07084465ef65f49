"""Forwards of a decoder over a few tokens that record its attention calls or replay recorded results; and the
rotations and windows that two recordings show."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import eager_mask

from locret_kernels.attend import attend_and_count

from .decoder_attention import (
    DecoderAttention,
    Rope,
    Rotation,
    Softmax,
    frequencies_of,
    rotaries_of,
    rotate,
    scaling_of,
    unrotate,
)
from .decoder_modules import DecoderStack
from .libraries import CACHE
from .spec import UnsupportedArchitecture
from .undo import Undo, run_eagerly

# ---- how a decoder's attention is asked for ---------------------------------------------------------------------------

# By name in transformers' interface, or as a method of its modules, ``_attn(query, key, value, mask)``, where it is not behind
# that: GPT-J, CodeGen, GPT-NeoX-Japanese.


Attended = tuple[Tensor, Tensor | None]
"""Attention's output, and its weights where they are asked for."""
Method = Callable[..., Attended]
"""A module's own, or what answers for it. Queries, keys, values and output are ``[B, heads, T, D]``; a mask comes last."""


def meet_attention(undo: Undo, decoder: PreTrainedModel, config: PreTrainedConfig, name: str, answer: Method) -> None:
    """Let a decoder ask the attention ``name``, or ``answer`` in place of its modules' methods, until ``undo``.

    Raises:
        UnsupportedArchitecture: it has another kind of attention.
    """
    undo.add(partial(decoder.set_attn_implementation, config._attn_implementation))
    decoder.set_attn_implementation(name)
    if config._attn_implementation != name:
        return _answer_methods(undo, decoder, config, name, answer)
    configs = (getattr(module, "config", None) for module in decoder.modules())
    for own in filter(None, configs):  # a layer that was copied has one of its own
        if own._attn_implementation != name:
            undo.add(partial(setattr, own, "_attn_implementation", own._attn_implementation))
            own._attn_implementation = name


def _answer_methods(undo: Undo, decoder: nn.Module, config: PreTrainedConfig, name: str, answer: Method) -> None:
    """Let a decoder make masks as the attention ``name`` has them, and ask ``answer(module, its own method, q, k, v, mask)`` for
    attention, until ``undo``.

    Raises:
        UnsupportedArchitecture: no module has such a method.
    """
    modules = [module for module in decoder.modules() if _is_method(getattr(type(module), "_attn", None))]
    if not modules:
        raise UnsupportedArchitecture("its attention is not behind transformers' interface")
    undo.add(partial(setattr, config, "_attn_implementation", config._attn_implementation))
    config._attn_implementation = name
    for module in modules:
        undo.add(partial(module.__dict__.pop, "_attn", None))
        module.__dict__["_attn"] = partial(answer, module, module._attn)


def _is_method(method: object) -> bool:
    return callable(method) and [*signature(method).parameters][1:] == ["query", "key", "value", "attention_mask"]


def is_softmax(own: Method, q_BHTD: Tensor, rows: int) -> bool:
    """Whether a method is softmax attention of these queries over all of ``rows`` keys, scaled by the root of their size."""
    draw, (_, H, _, D) = torch.Generator("cpu").manual_seed(0), q_BHTD.shape
    both = torch.randn(2, 1, H, rows, D, generator=draw, dtype=torch.float32, device="cpu").to(q_BHTD)
    keys, values, newest = *both, q_BHTD[:1, :, -1:]
    want, got = scaled_dot_product_attention(newest, keys, values), own(newest, keys, values, None)[0]
    return torch.allclose(got, want, rtol=0, atol=0.02 * float(want.abs().max()))


# ---- recorded forwards ----


NAME = "locret_probe"
LONG = 4096
"""Keys, at most, over which a method that is attention is tried."""
IGNORED = ("position_ids", "cache_position", "position_embeddings", "logits_to_keep", "layer_input")
"""Tensors among the arguments of attention that say nothing new."""


@dataclass(frozen=True)
class RecordedCall:
    """One attention call, its queries and keys ``[B, heads, T, D]`` as they came."""

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
    x: Tensor | None
    """Normed hidden states ``[B, T, C]`` of which q, k and v may be products, where layers are fused (see ``fused_layers``)."""


class IndexedCache(DynamicCache):
    """A cache that says which layer it was asked for last: modules that several layers share have one index for all of them.
    It drops no rows: recorded attention knows no windows."""

    asked: int | None = None

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.layers = [DynamicLayer() if type(one) is DynamicSlidingWindowLayer else one for one in self.layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Record the layer index that an attention module asks for; shapes ``[B, H, T, D]`` as in transformers."""
        self.asked = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Recording(threading.local):
    """Attention calls of this thread's probe."""

    calls: list[RecordedCall]
    outputs: list[Tensor]
    replayed: list[Tensor] | None = None
    cache: IndexedCache | None = None
    masks: dict[int, Callable[..., Tensor] | None]


NOW = Recording()


class CallArguments(TypedDict, total=False):
    """Named arguments that change an attention call; others are ignored."""

    softcap: float | None
    s_aux: Tensor | None
    is_causal: bool | None
    layer_input: Tensor | None


def softmax_of(q: Tensor, scaling: float | None, named: CallArguments) -> Softmax:
    """The softmax of an attention call with queries ``[B, Q, T, D]``."""
    return Softmax(q.shape[-1] ** -0.5 if scaling is None else scaling, named.get("softcap"), named.get("s_aux"))


def unknown_argument(named: CallArguments, tokens: int) -> str | None:
    """Name of an argument that would change the attention call and that the kit does not know; None if there is
    none."""
    for name, value in named.items():
        if isinstance(value, Tensor) and name not in IGNORED and name != "s_aux":
            return name
    return "is_causal=False" if tokens > 1 and named.get("is_causal") is False else None


def record(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, dropout: float = 0.0,
    scaling: float | None = None, **named: Unpack[CallArguments],
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention ``[B, T, Q, D]`` of a call, recorded with its arguments: queries ``[B, Q, T, D]``, keys and values
    ``[B, H, S, D]``."""
    number, cache = len(NOW.calls), NOW.cache
    index = None if cache is None else cache.asked
    if cache is not None:
        cache.asked = None
    softmax, unknown = softmax_of(q, scaling, named), unknown_argument(named, q.shape[2])
    NOW.calls.append(RecordedCall(module, index, q, k, v, attention_mask, softmax, unknown, named.get("layer_input")))
    if NOW.replayed is not None:
        return NOW.replayed[number], None
    out, _ = attend_and_count(q, k, v, **softmax._asdict())
    out = out.transpose(1, 2).contiguous().to(q.dtype)
    NOW.outputs.append(out)
    return out, None


def record_mask(*args: Any, **named: Any) -> Tensor | None:
    """The eager mask ``[B, 1, T, S]`` of a layer, with its mask function recorded."""
    mask = eager_mask(*args, **named)
    if mask is not None:
        NOW.masks[storage_of(mask)] = named.get("mask_function")
    return mask


def storage_of(x: Tensor) -> int:
    """An id of the storage of ``x`` (any shape), valid while the storage lives. It works on the meta device too,
    where addresses are 0."""
    return x.untyped_storage()._cdata


AttentionInterface.register(NAME, record)
AttentionMaskInterface.register(NAME, record_mask)


@contextmanager
def observed(decoder: PreTrainedModel, config: PreTrainedConfig) -> Iterator[None]:
    """Record a decoder's attention within the block, with modules in evaluation mode."""
    training, undo = [module for module in decoder.modules() if module.training], Undo()
    try:
        for module in training:
            module.training = False
        run_eagerly(undo, decoder)
        rows = min(getattr(config, "max_position_embeddings", None) or LONG, LONG)
        meet_attention(undo, decoder, config, NAME, partial(_record_method, rows))
        NOW.masks = {}
        yield
    finally:
        NOW.calls, NOW.outputs, NOW.replayed, NOW.cache, NOW.masks = [], [], None, None, {}
        undo.run()
        for module in training:
            module.training = True


def _record_method(rows: int, module: nn.Module, own: Method, q: Tensor, *rest: Any) -> Attended:
    """Attention ``[B, Q, T, D]`` in place of a module's method ``own``, recorded.

    Raises:
        UnsupportedArchitecture: ``own`` is not the usual softmax attention.
    """
    if NOW.replayed is None and not q.is_meta and not is_softmax(own, q, rows):
        raise UnsupportedArchitecture(f"attention of {type(module).__name__} is scaled or masked in a way of its own")
    return record(module, q, *rest)[0].transpose(1, 2), None


@dataclass(frozen=True)
class RecordedRun:
    """The record of a forward: its attention calls, their outputs, the final hidden states, and transformers' cache
    after it."""

    calls: list[RecordedCall]
    outputs: list[Tensor]
    hidden: Tensor
    cache: IndexedCache


@dataclass(frozen=True)
class Reading:
    """A decoder that reads token ids ``[1, T]`` while its attention is ``observed``."""

    decoder: DecoderStack
    config: PreTrainedConfig
    ids_1T: Tensor

    @cached_property
    def first(self) -> RecordedRun:
        """Run without changes."""
        return self.run(self.ids_1T)

    def run(
        self, ids_1T: Tensor, replayed: list[Tensor] | None = None, cache: IndexedCache | None = None, **more: Tensor
    ) -> RecordedRun:
        """Run the decoder over token ids ``[1, T]`` and record it.

        Args:
            replayed: results to return instead of computing attention. cache: of a text that the ids continue. more:
                ``position_ids``, where they are not those that follow.
        """
        NOW.calls, NOW.outputs, NOW.replayed = [], [], replayed
        NOW.cache = IndexedCache(config=self.config) if cache is None else cache
        hidden = self.decoder(input_ids=ids_1T, use_cache=True, **{CACHE: NOW.cache}, **more).last_hidden_state
        return RecordedRun(NOW.calls, NOW.outputs, hidden, NOW.cache)

    def again(self, **more: Tensor) -> RecordedRun:
        """Run over the same tokens, with the results of attention of the first run; ``more`` as in ``run``."""
        return self.run(self.ids_1T, self.first.outputs, None, **more)


ROUNDING = {torch.float64: 2e-5, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Tolerance for equal numbers of a type, relative to the largest. Norms and rotations of a float64 model are in
float32."""


def close(a: Tensor, b: Tensor, times: float = 1.0) -> bool:
    """Whether two tensors have one shape and are equal up to the rounding of their type."""
    if a.shape != b.shape:
        return False
    largest = b.float().abs().max().clamp(min=1e-6)
    return bool((a.float() - b.float()).abs().max() <= times * ROUNDING[b.dtype] * largest)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape share their storage or have equal numbers."""
    one = storage_of(a) == storage_of(b) and a.storage_offset() == b.storage_offset()
    return a.shape == b.shape and (one or (not a.is_meta and bool(torch.equal(a, b))))


# ---- the rotation of every layer: queries and keys of two readings that differ by it alone (see ``probe``) ----------


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
        norms = _norms(reading.decoder, call.module, before.q.shape[-1])
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


def _norms(decoder: nn.Module, attention: str, D: int) -> dict[str, Tensor]:
    """Weights ``[D]`` within an attention module, by path: possible norms of a head's channels."""
    weights = decoder.get_submodule(attention).named_parameters()
    return {f"{attention}.{path}": weight for path, weight in weights if weight.shape == (D,)}


def rotation_between(
    rotaries: dict[str, nn.Module], before: Sequence[Tensor], after: Sequence[Tensor], norms: Mapping[str, Tensor] = {},
    first: str = "",
) -> Rotation | None:  # fmt: skip
    """The rotation between queries and keys ``[B, heads, T, D]`` before and after RoPE; None if no known form fits.
    ``norms``: see ``_norms``. ``first``: the buffer to try first, since another may be equal in a few tokens."""
    pairs = list(zip(before, after, strict=True))
    if all(close(a, b) for a, b in pairs):
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
                    if all(close(_turned(a, rope, order), b[..., order]) for a, b in pairs):
                        return form
                    found = [_norm_between(a, b, norms, rope, order) for a, b in pairs]
                    if found[0] and found[1]:
                        return replace(form, norms=(found[0], found[1]))
    return None


def _norm_between(a: Tensor, b: Tensor, norms: Mapping[str, Tensor], rope: Rope, order: list[int]) -> str | None:
    """Path of the norm after the rotation between queries or keys ``[B, heads, T, D]`` a and b; None if none fits."""
    for name, weight_D in norms.items():
        weighted = Rope(rope.inv_freq, weight_R=weight_D[order][: 2 * len(rope.inv_freq)])
        if close(_turned(a, weighted, order), b[..., order]):
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
