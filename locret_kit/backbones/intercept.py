"""The one place where a backbone's attention is met.

``attach(model)`` routes every attention call of ``model`` to a handler, while one is set, and lets everything else pass
to the backbone's own attention. Meanwhile MLPs work in slices (``slices``), and elementwise work is fused where kernels act
(``fused``). A handler is any object with

    attend(layer, q_BQTD, k_BHTD, v_BHTD, scaling) -> out_BQTD

and gets q, k and v **before RoPE** (the rotary module answers cos = 1, sin = 0 meanwhile) when it says
``wants_unrotated = True``. One whose ``backend`` is ``triton`` lets kernels do the backbone's elementwise work, one that is
``native`` compiled calls on a CPU. The bounded cache is one handler, the training observer the other. This module knows neither.

A cache of several texts also has ``begin(model, arguments)``, which gives the arguments of the decoder's forward, and
``finish(hidden, ids)``, which is called after it (see ``cache.lanes``).

A handler that says ``needs_logits = True`` also has ``blocks(tokens)`` and ``read(hidden, ids)``: a forward is then cut into
its blocks, and after each of them ``read`` gets the final hidden states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from locret_kernels.native import prefill

from .families import decoder_of, require_adapter, text_config
from .fused import fuse
from .parallel import AllHeads, group_of
from .slices import replace_forward, slice_mlps
from .widened import widen

NAME = "locret"


class Handler(Protocol):
    """Receiver of a backbone's attention calls."""

    wants_unrotated: bool

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scaling: float) -> Tensor: ...


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


def _refuse_padding(mask: object) -> None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask={shape}: a bounded cache is causal, it takes ones [batch, tokens] or none")
    if mask is not None and mask.shape[1] > 1 and not bool(mask.all()):
        raise ValueError(
            f"attention_mask has {int((mask == 0).sum())} padded positions; a bounded cache takes one text, and a "
            "padded batch a BatchCache"
        )


def _refuse_other_places(seen: int, tokens: int, position_ids: object) -> None:
    """New tokens must continue where the cache ends. Calling `generate` twice with the same text or with ``use_cache=False``
    violates this, and so does a packed text."""
    if not tokens or (isinstance(position_ids, Tensor) and not position_ids.numel()):
        raise ValueError(f"no new tokens: this cache has seen {seen}, and generate takes those again before new ones")
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        return
    places_T = torch.arange(seen, seen + tokens, device=position_ids.device)
    if position_ids.shape[1] != tokens or not bool((position_ids == places_T).all()):
        first, last = position_ids[0, 0].item(), position_ids[0, -1].item()
        raise ValueError(
            f"position_ids={first} to {last} must be {seen} to {seen + tokens - 1}, where this cache goes on: it takes one text, "
            "in order and once; another one needs reset() or a new cache"
        )


def kernels_act(x: Tensor) -> bool:
    """Whether the forward that runs now in this thread leaves elementwise work on ``x`` to kernels: on a card, where its
    handler has them."""
    handler = _ACTIVE.handler
    return handler is not None and x.device.type != "cpu" and getattr(handler, "backend", "reference") != "reference"


def _compiled(x: Tensor) -> bool:
    """Whether the handler of the forward that runs now in this thread lets compiled calls work on ``x``, on a CPU."""
    return type(x) is Tensor and x.device.type == "cpu" and getattr(_ACTIVE.handler, "native", False)


def _differentiated(*xs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def acts(x: Tensor, *others: Tensor) -> str | None:
    """Name of what does elementwise work on ``x`` in the forward that runs now in this thread: kernels on a card, compiled calls
    on a CPU for a handler that is ``native``, or None for the backbone itself, as where ``x`` or what it is computed with is
    differentiated."""
    if _differentiated(x, *others):
        return None
    if kernels_act(x):
        return "triton"
    return "native" if _compiled(x) and x.dtype in prefill.DTYPES else None


def unrotated(rotary: Any) -> Callable[[], None]:
    """Let a rotary module answer cos = 1, sin = 0 while a handler wants q and k before RoPE; returns what undoes it. Its own
    forward is not called then: of LongRoPE it makes the host wait for the largest position, in every forward."""

    def answer(forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *kind: str, **named: str) -> Any:
        if _ACTIVE.handler is None or not _ACTIVE.handler.wants_unrotated:
            return forward(x, position_ids, *kind, **named)
        if not _differentiated(x) and (kernels_act(x) or _compiled(x)):
            return None, None  # `fused` passes q and k through
        inv_freq = getattr(rotary, "_".join((*kind, *named.values(), "inv_freq")))  # a layer's type, where types differ
        cos_BTR = x.new_ones(*position_ids.shape, 2 * inv_freq.shape[-1])
        return cos_BTR, torch.zeros_like(cos_BTR)

    return replace_forward(rotary, answer)


def _as_rows(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states as rows of one matrix. Of a block's last token alone, a slice, PyTorch makes a batch of matrices, and
    in bfloat16 on a CPU copies the vocabulary's weights for it at every call."""
    hidden, *rest = args
    return hidden.reshape(-1, hidden.shape[-1]).contiguous().view(hidden.shape), *rest


def is_own_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is one that ``attach`` has put there."""
    return hook is _as_rows


class Attachment:
    """A model whose attention is met; ``detach()`` (or leaving the ``with`` block) restores it exactly."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._explicit = _Active()
        config = text_config(model)
        if config._attn_implementation == NAME:
            raise RuntimeError("this model is attached already: detach it first")
        self._previous = config._attn_implementation
        self._ranks = group_of(model)
        decoder, words = decoder_of(model), model.get_output_embeddings()
        model.set_attn_implementation(NAME)
        self._undo = [
            replace_forward(decoder, self._forward),
            fuse(model, acts),
            widen(model, _compiled),
            slice_mlps(model),
        ]
        if hasattr(decoder, "rotary_emb"):
            self._undo.append(unrotated(decoder.rotary_emb))
        if words is not None:
            self._undo.append(words.register_forward_pre_hook(_as_rows).remove)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The decoder's ``forward``, with a handler set in this thread while it runs, whatever it raises."""
        past: Any = kwargs.get("past_key_values")
        explicit = self._explicit.handler
        handler: Any = (past if hasattr(past, "attend") else None) if explicit is None else explicit
        if handler is None:
            return _handled(None, forward, *args, **kwargs)
        ids = args[0] if args else kwargs.get("input_ids")
        several = explicit is None and hasattr(past, "begin")  # texts of different lengths
        if several:
            kwargs = past.begin(self.model, {**kwargs, "input_ids": ids})
            args, ids = (), kwargs["input_ids"]
        else:
            _refuse_padding(kwargs.get("attention_mask"))
        if explicit is None and not several:
            past.bind(self.model)
            new = kwargs.get("inputs_embeds") if ids is None else ids
            if new is not None:
                _refuse_other_places(past.get_seq_length(), new.shape[1], kwargs.get("position_ids"))
        if handler.wants_unrotated:
            require_adapter(text_config(self.model))
        if self._ranks is not None:
            handler = AllHeads(handler, self._ranks)
        detached = "detached while this forward ran: attach a model once, and detach it when no thread uses it"
        try:
            if getattr(handler, "needs_logits", False):
                output = _read_blocks(handler, forward, ids, kwargs)
            else:
                output = _handled(handler, forward, *args, **kwargs)
        except Exception as error:
            if not self._undo:  # the rest of it was the backbone's own, to which no rotation was given
                raise RuntimeError(detached) from error
            raise
        if several:
            past.finish(output.last_hidden_state, ids)
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
        undo, self._undo = self._undo, []
        for restore in reversed(undo):  # an MLP's forward is replaced twice
            restore()
        if undo:
            self.model.set_attn_implementation(self._previous)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def _read_blocks(handler: Any, forward: Callable[..., Any], ids: Tensor | None, kwargs: dict[str, Any]) -> Any:
    """One forward, cut into the handler's blocks; after each of them it reads the final hidden states."""
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
    return Attachment(model)


_SHARED: dict[int, tuple[Attachment, int]] = {}
"""Attachments of ``attached`` by the model's id, and how many blocks use each."""
_LOCK = threading.Lock()


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """The model attached inside the block, unless it is already. Blocks of several threads, or of several answers that are
    written by turns, may overlap: the last one detaches."""
    with _LOCK:
        attachment, users = _SHARED.get(id(model), (None, 0))
        mine = attachment is not None or not is_attached(model)
        if mine:
            _SHARED[id(model)] = attachment or attach(model), users + 1
    try:
        yield
    finally:
        if mine:
            with _LOCK:
                attachment, users = _SHARED.pop(id(model))
                if users > 1:
                    _SHARED[id(model)] = attachment, users - 1
                else:
                    attachment.detach()


def is_attached(model: Any) -> bool:
    """Whether ``model`` is attached now."""
    return bool(text_config(model)._attn_implementation == NAME)
