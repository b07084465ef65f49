"""Forwards of a decoder over a few tokens that record its attention calls or replay recorded results, and the windows of recorded
calls, read off the mask that each is given."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import eager_mask

from locret_kernels.attend import attend_and_count

from .attention_interface import Attended, Method, is_softmax, meet_attention
from .decoder_modules import DecoderStack
from .handlers import Softmax
from .libraries import CACHE
from .spec import UnsupportedArchitecture
from .undo import Undo, run_eagerly

NAME = "locret_probe"
TOKENS = 12
"""Tokens that are read."""
FARTHEST = 1 << 20
"""Position, at most, whose visible tokens say how long a window is."""
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
