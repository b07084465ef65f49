"""Interception of a backbone's attention.

``attach(model)`` routes every attention call of ``model`` to the current handler (see ``Handler``). Without one,
calls go to the backbone's own attention. A forward's handler is that of the cache passed to it, or the one of
``handled_by``. It gets layer numbers as in ``BackboneSpec``, and queries and keys with their channels in the order
that ``Rope`` rotates. During such a forward, MLPs run in slices, and the handler computes elementwise operations
that it supports (``fused_layers``).
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Self, Unpack
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_interface import Attended, Method, meet_attention
from .bfloat16 import give_rows, widen
from .decoder_attention import Calls, DecoderAttention, KnownCalls, rotaries_of, unrotate
from .decoder_modules import DecoderOutput, DecoderStack, Forward, decoder_of, device_of
from .fused_layers import fuse_layers
from .handlers import Handler, LayerOperations
from .libraries import cache_among
from .mlp_slices import slice_mlps
from .probe import describe
from .recording import CallArguments, softmax_of, unknown_argument
from .skipped_rotations import skip_rotations
from .spec import text_config
from .undo import Undo, replace_forward, run_eagerly
from .wrapped import unwrapped


def read_blocks(handler: Handler, run: Forward, **kwargs: Any) -> DecoderOutput:
    """One forward, cut into the handler's blocks; after each of them it reads the final hidden states."""
    ids = kwargs.get("input_ids")
    tokens = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
    start, outputs = 0, list[DecoderOutput]()
    for length in handler.blocks(tokens):
        new = slice(start, start + length)
        piece = {name: _of_tokens(value, new, tokens) for name, value in kwargs.items() if name != "attention_mask"}
        outputs.append(run(**piece))
        handler.read(outputs[-1].last_hidden_state, None if ids is None else ids[:, new])
        start += length
    whole = outputs[-1]
    for name in list(whole.__dict__) if len(outputs) > 1 else ():
        setattr(whole, name, _joined([getattr(output, name) for output in outputs]))
    return whole


def _joined(parts: list[Any]) -> Any:
    """One field of the outputs of blocks: states ``[B, T, E]``, rows ``[T, N]`` of a router, or tuples of them, of all tokens."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(several)) for several in zip(*parts, strict=True))
    return torch.cat(parts, dim=int(parts[0].dim() > 2)) if isinstance(parts[0], Tensor) else parts[-1]


def _of_tokens(value: object, new: slice, tokens: int) -> object:
    """Part of a forward's argument that belongs to some of its tokens."""
    if isinstance(value, Tensor) and value.dim() > 1:
        if value.shape[1] == tokens:
            return value[:, new]
        if value.shape[-1] == tokens:
            return value[..., new]
    return value


NAME = "locret"


class _Active(threading.local):
    """A thread's handler, the calls of the forward that runs now, and the attention that the model had before."""

    handler: Handler | None = None
    calls: Calls | None = None
    own: str = "sdpa"


_ACTIVE = _Active()


class _WithoutGradient(torch.autograd.Function):
    """Attention of a handler without gradients; backward raises, because layers below would silently get none."""

    @staticmethod
    def forward(ctx: object, out: Tensor, q: Tensor) -> Tensor:
        """Return ``out``, of any shape, unchanged."""
        return out

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> NoReturn:
        raise RuntimeError("a bounded cache computes no gradients: train without it, or under torch.no_grad()")


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # where transformers' own have it: who wraps them all (kvpress) passes it by place
    scaling: float | None = None,
    **kw: Unpack[CallArguments],
) -> Attended:
    """Attention ``[B, T, Q, D]`` of rotated queries ``[B, Q, T, D]`` and new keys and values ``[B, H, T, D]``, by
    this thread's handler or, without one, by the model's own function."""
    handler, calls, name = _ACTIVE.handler, _ACTIVE.calls, type(module).__name__
    if handler is None or calls is None:
        eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", sdpa_attention_forward)
        own = ALL_ATTENTION_FUNCTIONS.get_interface(_ACTIVE.own, eager)
        return own(module, q, k, v, attention_mask, dropout=dropout, scaling=scaling, **kw)
    if (unknown := unknown_argument(kw, q.shape[2])) is not None:
        raise ValueError(f"{name} is given {unknown!r}, which a bounded cache does not know")
    if isinstance(attention_mask, Tensor):
        raise ValueError(f"{name} is given a mask of the model's own, which a bounded cache does not know")
    call, order_D = calls.next(module)
    if order_D is not None:
        q, k = q[..., order_D], k[..., order_D]
    if call.shared:
        out = handler.attend_shared(call.layer, q, k, v, softmax_of(q, scaling, kw))
    else:
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"{name} has {q.shape[2]} queries and {k.shape[2]} new keys")
        out = handler.attend(call.layer, q, k, v, softmax_of(q, scaling, kw), kw.get("layer_input"))
    if q.requires_grad and torch.is_grad_enabled() and not out.requires_grad:
        out = _WithoutGradient.apply(out, q)
    return out.transpose(1, 2).contiguous(), None


def _method(module: nn.Module, own: Method, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Attended:
    """Attention ``[B, Q, T, D]`` in place of a module's method ``own``, of rotated ``[B, Q, T, D]`` and ``[B, H, T, D]``."""
    if _ACTIVE.handler is None:
        return own(q, k, v, mask)
    return _attention(module, q, k, v, mask)[0].transpose(1, 2), None


def _mask(*args: object, **kwargs: object) -> object:
    own = ALL_MASK_ATTENTION_FUNCTIONS.get(_ACTIVE.own, sdpa_mask)
    return own(*args, **kwargs) if _ACTIVE.handler is None else None


def active_handler() -> Handler | None:
    """The handler of this thread's current forward, if any."""
    return _ACTIVE.handler


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def operations(x: Tensor, *others: Tensor) -> LayerOperations | None:
    """Operations of this thread's current forward for ``x`` ``[B, T, E]`` and its other inputs; None if the
    backbone's own must be used, for example if a tensor needs gradients."""
    handler, several = _ACTIVE.handler, (x, *others)
    if handler is None or (torch.is_grad_enabled() and any(x.requires_grad for x in several)):
        return None
    return handler.operations(x)


def _wants_unrotated() -> bool:
    """Whether the handler of this thread's current forward needs q and k before RoPE."""
    handler = _ACTIVE.handler
    return handler is not None and handler.wants_unrotated


def _unrotated_operations(x: Tensor, *others: Tensor) -> LayerOperations | None:
    """``operations`` for ``x`` ``[B, T, E]`` if the handler needs q and k before RoPE, so that rotations are
    skipped; otherwise None."""
    return operations(x, *others) if _wants_unrotated() else None


class Attachment:
    """A model whose attention calls are intercepted from ``start()`` to ``detach()`` or the end of a ``with`` block.
    Both restore the model exactly, and an interrupt of either leaves the model as it was."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model = unwrapped(model)
        self._explicit = _Active()
        self._undo = Undo()
        self._own = "sdpa"
        self._known: KnownCalls = {}
        self._rotaries: dict[str, nn.Module] = {}

    def start(self) -> Self:
        """Meet the model's attention from now on.

        Raises:
            RuntimeError: the model is attached already. UnsupportedArchitecture: its attention is of no known form.
        """
        model, undo, config = self.model, self._undo, text_config(self.model)
        _sweep(model)
        before = config._attn_implementation
        if before == NAME:
            raise RuntimeError("this model is already attached: detach it first")
        description = describe(model)
        decoder, words = decoder_of(model), model.get_output_embeddings()
        try:
            run_eagerly(undo, model)
            meet_attention(undo, decoder, config, NAME, _method)
            self._own = before
            self._known = _calls_of(decoder, description)
            replace_forward(undo, decoder, self._forward)
            undo.add(lambda: decoder.__dict__.pop("__reduce_ex__", None))
            decoder.__dict__["__reduce_ex__"] = _refuse_copy
            self._rotaries = rotaries_of(decoder)
            unrotate(undo, decoder, _wants_unrotated, in_halves=description.answers_in_halves)
            if description.skips_rotation:
                skip_rotations(undo, decoder, _unrotated_operations)
            if description.fuses_layers:
                fuse_layers(undo, decoder, operations)
            widen(undo, model, operations)
            slice_mlps(undo, model)
            if words is not None:
                give_rows(undo, words)
        except BaseException:
            undo.run()
            raise
        return self

    def _forward(self, forward: Forward, *args: object, **kwargs: Any) -> DecoderOutput:
        """The decoder's ``forward``, with a handler set in this thread while it runs, whatever it raises."""
        cache = cache_among(args, kwargs)
        own = getattr(cache, "handler", cache)
        handler = self._explicit.handler or (own if isinstance(own, Handler) else None)
        if handler is None:
            return self._run(None, forward, *args, **kwargs)
        decoder = decoder_of(self.model)
        same = all(decoder.get_submodule(path) is rotary for path, rotary in self._rotaries.items())
        if not (same and is_attached(self.model)):
            raise RuntimeError("attention or a rotary module was changed on an attached model: detach it first")
        if args:
            kwargs = {**inspect.signature(forward).bind_partial(*args).arguments, **kwargs}
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions=True: attention over a bounded cache gives no weights")
        kwargs = handler.begin(self.model, kwargs)
        detached = "detached while this forward ran: attach a model once, and detach it when no thread uses it"
        try:
            run = partial(self._run, handler, forward)
            output = read_blocks(handler, run, **kwargs) if handler.in_blocks else run(**kwargs)
        except Exception as error:
            if not self._undo:  # the rest of it was the backbone's own, to which no rotation was given
                raise RuntimeError(detached) from error
            raise
        if not self._undo:
            raise RuntimeError(detached)
        handler.finish(output.last_hidden_state, kwargs.get("input_ids"))
        return output

    def _run(self, handler: Handler | None, forward: Forward, *args: object, **kwargs: object) -> DecoderOutput:
        """Run a forward whose attention calls go to ``handler``, in this thread. KeyboardInterrupt also restores the previous
        state, since torch then calls no forward hook."""
        before = _ACTIVE.handler, _ACTIVE.calls, _ACTIVE.own
        try:
            _ACTIVE.handler, _ACTIVE.calls, _ACTIVE.own = handler, Calls(self._known), self._own
            return forward(*args, **kwargs)
        finally:
            _ACTIVE.handler, _ACTIVE.calls, _ACTIVE.own = before

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Send every attention call of this thread inside the block to ``handler``, whatever cache is passed."""
        self._explicit.handler = handler
        try:
            yield
        finally:
            self._explicit.handler = None

    def detach(self) -> None:
        """Restore forwards, hooks and the attention implementation; safe to call twice."""
        self._undo.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def _refuse_copy(protocol: object) -> NoReturn:
    """Raise TypeError where a decoder is copied or pickled, because a copy would call its forward."""
    raise TypeError("an attached model cannot be copied or pickled: detach it first (save_pretrained works)")


def _calls_of(decoder: DecoderStack, description: DecoderAttention) -> KnownCalls:
    known: KnownCalls = {}
    orders = [rotation.order for rotation in description.rotations] or [None] * description.spec.n_layers
    for call in description.calls:
        module, order = decoder.get_submodule(call.module), orders[call.layer]
        order_D = None if order is None else torch.tensor(order, device=device_of(module))
        known.setdefault(module, []).append((call, order_D))
    return known


def attach(model: PreTrainedModel) -> Attachment:
    """Send ``model``'s attention calls to the cache of each forward: ``with attach(model): model.generate(...)``.

    Returns the attachment, which has begun. The end of the ``with`` block, or its ``detach()``, restores the model. A
    forward with another kind of cache, or with none, computes the model's own attention.

    A model is attached once and may then be used by many threads, each with caches of its own. Attach it before they start
    and detach it when they have ended: a forward during which its model is detached raises RuntimeError.

    Raises:
        RuntimeError: the model is attached already. UnsupportedArchitecture: its attention is of no form that the kit knows.
    """
    return Attachment(model).start()


class _Block:
    """A ``with`` block of ``attached``."""


_SHARED: dict[int, tuple[Attachment, WeakSet[_Block]]] = {}
"""Attachments of ``attached`` by the model's id, and the blocks that use each. A block whose end was interrupted leaves the set
with its frame."""
_LOCK = threading.RLock()  # `attached` holds it while an attachment starts, which sweeps


def _sweep(model: PreTrainedModel) -> None:
    """Detach a model that no block uses any more."""
    with _LOCK:
        attachment, blocks = _SHARED.get(id(model), (None, ()))
        if attachment is not None and not blocks:
            attachment.detach()
            del _SHARED[id(model)]


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """The model attached inside the block, unless it is already. Blocks of several threads, or of several answers that are
    written by turns, may overlap: the last one detaches."""
    block, model = _Block(), unwrapped(model)
    try:
        with _LOCK:
            if id(model) in _SHARED or not is_attached(model):
                attachment, blocks = _SHARED.setdefault(id(model), (Attachment(model), WeakSet()))
                blocks.add(block)
                if not is_attached(model):
                    attachment.start()
        yield
    finally:
        del block
        _sweep(model)


def is_attached(model: PreTrainedModel) -> bool:
    """Whether ``model`` is attached now."""
    return bool(text_config(model)._attn_implementation == NAME)
