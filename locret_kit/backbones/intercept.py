"""The one place where a backbone's attention is met.

``attach(model)`` routes every attention call of ``model`` to a handler (see ``handler``), while one is set, and lets everything
else pass to the backbone's own attention. A forward's handler is the cache that it is given, or the one of ``handled_by``.
Meanwhile MLPs work in slices (``slices``), and elementwise work is the handler's where it has operations for it (``fused``).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .families import decoder_of, require_adapter, text_config
from .fused import fuse
from .handler import Handler, LayerOperations
from .parallel import AllHeads, group_of
from .releases import cache_among
from .slices import slice_mlps
from .undo import Undo, replace_forward
from .widened import widen

NAME = "locret"


class _Active(threading.local):
    """A handler per thread."""

    handler: Handler | None = None


_ACTIVE = _Active()


def _handled(handler: Handler | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward whose attention calls go to ``handler``, in this thread. KeyboardInterrupt restores what was set before
    too: torch calls no forward hook after it."""
    before = _ACTIVE.handler
    try:
        _ACTIVE.handler = handler
        return forward(*args, **kwargs)
    finally:
        _ACTIVE.handler = before


def _attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # where transformers' own have it: who wraps them all (kvpress) passes it by place
    scaling: float | None = None,
    **kw: Any,
) -> tuple[Tensor, None]:
    handler = _ACTIVE.handler
    if handler is None:
        return sdpa_attention_forward(module, q, k, v, attention_mask, dropout, scaling, **kw)
    for name in ("softcap", "s_aux"):  # a cap on the logits; attention sinks (gpt-oss)
        if kw.get(name) is not None:
            raise ValueError(f"this backbone's attention has {name!r}, which the bounded cache does not support")
    out = handler.attend(module.layer_idx, q, k, v, q.shape[-1] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return sdpa_mask(*args, **kwargs) if _ACTIVE.handler is None else None


def active_handler() -> Handler | None:
    """The handler of the forward that runs now in this thread, if any."""
    handler = _ACTIVE.handler
    return handler.of if isinstance(handler, AllHeads) else handler


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def operations(x: Tensor, *others: Tensor) -> LayerOperations | None:
    """Operations of the forward that runs now in this thread for ``x`` and what it is computed with; None where the backbone's
    own are used, as where one of the tensors is differentiated."""
    handler, several = _ACTIVE.handler, (x, *others)
    if handler is None or (torch.is_grad_enabled() and any(x.requires_grad for x in several)):
        return None
    return handler.operations(x)


def unrotated(undo: Undo, rotary: Any) -> None:
    """Let a rotary module answer cos = 1, sin = 0 while a handler wants q and k before RoPE, until ``undo``. Its own forward is
    not called then: of LongRoPE it makes the host wait for the largest position."""

    def answer(forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *kind: str, **named: str) -> Any:
        if _ACTIVE.handler is None or not _ACTIVE.handler.wants_unrotated:
            return forward(x, position_ids, *kind, **named)
        if operations(x) is not None:
            return None, None  # `fused` passes q and k through
        inv_freq = getattr(rotary, "_".join((*kind, *named.values(), "inv_freq")))  # a layer's type, where types differ
        cos_BTR = x.new_ones(*position_ids.shape, 2 * inv_freq.shape[-1])
        return cos_BTR, torch.zeros_like(cos_BTR)

    replace_forward(undo, rotary, answer)


def _as_rows(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states as rows of one matrix. Of a block's last token alone, a slice, PyTorch makes a batch of matrices, and
    in bfloat16 on a CPU copies the vocabulary's weights for it at every call."""
    hidden, *rest = args
    return hidden.reshape(-1, hidden.shape[-1]).contiguous().view(hidden.shape), *rest


def is_own_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is one that ``attach`` has put there."""
    return hook is _as_rows


def _give_rows(undo: Undo, words: nn.Module) -> None:
    """Let the last layer see its hidden states ``_as_rows`` until ``undo``."""

    def restore() -> None:
        for key in [key for key, hook in words._forward_pre_hooks.items() if is_own_hook(hook)]:
            del words._forward_pre_hooks[key]

    undo.add(restore)
    words.register_forward_pre_hook(_as_rows)


class Attachment:
    """A model whose attention is met from ``start()`` until ``detach()``, or the end of a ``with`` block, which restore it
    exactly. An interrupt of either leaves the model as it was."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._explicit = _Active()
        self._undo = Undo()
        self._ranks = group_of(model)

    def start(self) -> None:
        """Meet the model's attention from now on.

        Raises:
            RuntimeError: the model is attached already.
        """
        model, undo, config = self.model, self._undo, text_config(self.model)
        _sweep(model)
        if config._attn_implementation == NAME:
            raise RuntimeError("this model is attached already: detach it first")
        decoder, words = decoder_of(model), model.get_output_embeddings()
        try:
            undo.add(partial(model.set_attn_implementation, config._attn_implementation))
            model.set_attn_implementation(NAME)
            replace_forward(undo, decoder, self._forward)
            fuse(undo, model, operations)
            widen(undo, model, operations)
            slice_mlps(undo, model)
            if hasattr(decoder, "rotary_emb"):
                unrotated(undo, decoder.rotary_emb)
            if words is not None:
                _give_rows(undo, words)
        except BaseException:
            undo.run()
            raise

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The decoder's ``forward``, with a handler set in this thread while it runs, whatever it raises."""
        cache = cache_among(args, kwargs)
        handler = self._explicit.handler or (cache if isinstance(cache, Handler) else None)
        if handler is None:
            return _handled(None, forward, *args, **kwargs)
        if args:
            kwargs = {**inspect.signature(forward).bind_partial(*args).arguments, **kwargs}
        kwargs = handler.begin(self.model, kwargs)
        if handler.wants_unrotated:
            require_adapter(text_config(self.model))
        if self._ranks is not None:
            handler = AllHeads(handler, self._ranks)
        detached = "detached while this forward ran: attach a model once, and detach it when no thread uses it"
        try:
            run = _read_blocks if handler.needs_logits else _handled
            output = run(handler, forward, **kwargs)
        except Exception as error:
            if not self._undo:  # the rest of it was the backbone's own, to which no rotation was given
                raise RuntimeError(detached) from error
            raise
        handler.finish(output.last_hidden_state, kwargs.get("input_ids"))
        if not self._undo:
            raise RuntimeError(detached)
        return output

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

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def _read_blocks(handler: Handler, forward: Callable[..., Any], **kwargs: Any) -> Any:
    """One forward, cut into the handler's blocks; after each of them it reads the final hidden states."""
    ids = kwargs.get("input_ids")
    if ids is None:
        raise ValueError("this policy scores tokens by their probability: give input_ids, not inputs_embeds")
    per_token = {name: kwargs[name] for name in ("position_ids", "cache_position") if kwargs.get(name) is not None}
    rest = {name: value for name, value in kwargs.items() if name not in ("input_ids", "attention_mask", *per_token)}
    start, output, hidden = 0, None, []
    for length in handler.blocks(ids.shape[1]):
        new = slice(start, start + length)
        piece = {name: value[..., new] for name, value in per_token.items()}
        output = _handled(handler, forward, input_ids=ids[:, new], **piece, **rest)
        handler.read(output.last_hidden_state, ids[:, new])
        hidden.append(output.last_hidden_state)
        start += length
    if output is not None and len(hidden) > 1:
        output.last_hidden_state = torch.cat(hidden, dim=1)
    return output


def attach(model: Any) -> Attachment:
    """Route ``model``'s attention to bounded caches and observers until ``detach()``; usable in ``with``.

    A model is attached once and may then be used by many threads, each with caches of its own. Attach it before they start
    and detach it when they have ended: a forward during which its model is detached raises RuntimeError.

    Raises:
        RuntimeError: the model is attached already.
    """
    attachment = Attachment(model)
    attachment.start()
    return attachment


class _Block:
    """A ``with`` block of ``attached``."""


_SHARED: dict[int, tuple[Attachment, WeakSet[_Block]]] = {}
"""Attachments of ``attached`` by the model's id, and the blocks that use each. A block whose end was interrupted leaves the set
with its frame."""
_LOCK = threading.RLock()  # `attached` holds it while an attachment starts, which sweeps


def _sweep(model: Any) -> None:
    """Detach a model that no block uses any more."""
    with _LOCK:
        attachment, blocks = _SHARED.get(id(model), (None, ()))
        if attachment is not None and not blocks:
            attachment.detach()
            del _SHARED[id(model)]


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """The model attached inside the block, unless it is already. Blocks of several threads, or of several answers that are
    written by turns, may overlap: the last one detaches."""
    block = _Block()
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


def is_attached(model: Any) -> bool:
    """Whether ``model`` is attached now."""
    return bool(text_config(model)._attn_implementation == NAME)
