"""The one place where a backbone's attention is met.

``attach(model)`` routes every attention call of ``model`` to a handler, while one is set, and lets everything else pass
to the backbone's own attention. Meanwhile MLPs work in slices (``slices``). A handler is any object with

    attend(layer, q_BQTD, k_BHTD, v_BHTD, scaling) -> out_BQTD

and gets q, k and v **before RoPE** (the rotary module answers cos = 1, sin = 0 meanwhile) when it says
``wants_unrotated = True``. The bounded cache is one handler, the training observer the other. This module knows neither.

A handler that says ``needs_logits = True`` also has ``blocks(tokens)`` and ``read(hidden, ids)``: a forward is then cut into
its blocks, and after each of them ``read`` gets the final hidden states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .families import decoder_of, require_adapter, text_config
from .slices import slice_mlps

NAME = "locret"


class Handler(Protocol):
    """What receives a backbone's attention calls."""

    wants_unrotated: bool

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scaling: float) -> Tensor: ...


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Handler | None] = []

    @property
    def handler(self) -> Handler | None:
        return self.stack[-1] if self.stack else None


_ACTIVE = _Active()


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
    return _ACTIVE.handler


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def _refuse_padding(mask: Any) -> None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask={shape}: a bounded cache is causal, it takes ones [batch, tokens] or none")
    if mask is not None and mask.shape[1] > 1 and not bool(mask.all()):
        raise ValueError(
            f"attention_mask has {int((mask == 0).sum())} padded positions; a bounded cache takes unpadded batches: "
            "run prompts of different length one by one"
        )


def _refuse_other_places(seen: int, tokens: int, position_ids: Any) -> None:
    """New tokens stand behind those that the cache has seen: `generate` asks for other places where it is called again with
    the same text, or with ``use_cache=False``, and a packed text has places of its own."""
    if not tokens:
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


def unrotated(rotary: Any) -> Callable[[], None]:
    """Let a rotary module answer cos = 1, sin = 0 while a handler wants q and k before RoPE; returns what undoes it. Its own
    forward is not called then: of LongRoPE it makes the host wait for the largest position, in every forward."""
    forward, shadowed = rotary.forward, vars(rotary).get("forward")  # accelerate puts its own there

    def answer(x: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> Any:
        if _ACTIVE.handler is None or not _ACTIVE.handler.wants_unrotated:
            return forward(x, position_ids, *kind, **named)
        inv_freq = getattr(rotary, "_".join((*kind, *named.values(), "inv_freq")))  # a layer's type, where types differ
        cos_BTR = x.new_ones(*position_ids.shape, 2 * inv_freq.shape[-1])
        return cos_BTR, torch.zeros_like(cos_BTR)

    def restore() -> None:
        if shadowed is None:
            del rotary.forward
        else:
            rotary.forward = shadowed

    rotary.forward = answer
    return restore


def _as_rows(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states as rows of one matrix. Of a block's last token alone, a slice, PyTorch makes a batch of matrices, and
    in bfloat16 on a CPU copies the vocabulary's weights for it at every call."""
    hidden, *rest = args
    return hidden.reshape(-1, hidden.shape[-1]).contiguous().view(hidden.shape), *rest


class Attachment:
    """A model whose attention is met; ``detach()`` (or leaving the ``with`` block) restores it exactly."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = decoder_of(model)
        self._explicit: Handler | None = None
        self._earlier: list[list[Tensor]] = []  # hidden states of the blocks before the last, a forward each
        config = text_config(model)
        if config._attn_implementation == NAME:
            raise RuntimeError("this model is attached already: detach it first")
        self._previous = config._attn_implementation
        self.model.set_attn_implementation(NAME)
        self._hooks = [
            self.decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.decoder.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        self._rotate_again = unrotated(self.decoder.rotary_emb) if hasattr(self.decoder, "rotary_emb") else lambda: None
        if (words := model.get_output_embeddings()) is not None:
            self._hooks.append(words.register_forward_pre_hook(_as_rows))
        self._unslice = slice_mlps(model)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        _ACTIVE.stack.append(None)  # first, since `_leave` pops whatever happens below
        self._earlier.append([])
        past: Any = kwargs.get("past_key_values")
        if not hasattr(past, "attend"):
            past = None
        handler: Handler | None = past if self._explicit is None else self._explicit
        if handler is None:
            return None
        _refuse_padding(kwargs.get("attention_mask"))
        if self._explicit is None:
            past.bind(self.model)
            words = args[0] if args else kwargs.get("input_ids")
            new: Any = kwargs.get("inputs_embeds") if words is None else words
            if new is not None:
                _refuse_other_places(past.get_seq_length(), new.shape[1], kwargs.get("position_ids"))
        if handler.wants_unrotated:
            require_adapter(text_config(self.model))
        if getattr(handler, "needs_logits", False):
            args, kwargs = self._read_blocks(module, handler, args, kwargs)
        _ACTIVE.stack[-1] = handler
        return args, kwargs

    def _read_blocks(self, module: nn.Module, handler: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Run every block of this forward but the last; what is left is the arguments of the last."""
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            raise ValueError("this policy scores tokens by their probability: give input_ids, not inputs_embeds")
        rest = {name: value for name, value in kwargs.items() if name not in ("input_ids", "attention_mask")}
        start, ends = 0, list(accumulate(handler.blocks(ids.shape[1])))
        for end in ends:
            piece = {"input_ids": ids[:, start:end], **rest}
            for name in ("position_ids", "cache_position"):
                if piece.get(name) is not None:
                    piece[name] = piece[name][..., start:end]
            if end == ends[-1]:
                break
            self._earlier[-1].append(module(**piece).last_hidden_state)
            start = end
        return (), piece

    def _leave(self, module: nn.Module, args: Any, kwargs: dict, output: Any) -> Any:
        handler, earlier = _ACTIVE.stack.pop(), self._earlier.pop()
        if output is None or not getattr(handler, "needs_logits", False):
            return None
        handler.read(output.last_hidden_state, kwargs["input_ids"])  # type: ignore[union-attr]
        if earlier:
            output.last_hidden_state = torch.cat((*earlier, output.last_hidden_state), dim=1)
        return output

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Send every attention call inside the block to ``handler``, whatever cache is passed."""
        self._explicit = handler
        try:
            yield
        finally:
            self._explicit = None

    def detach(self) -> None:
        """Remove every hook and slice, and restore the attention implementation; safe to call twice."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._unslice()
            self._rotate_again()
            self.model.set_attn_implementation(self._previous)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def attach(model: Any) -> Attachment:
    """Route ``model``'s attention to bounded caches and observers until ``detach()``; usable in ``with``."""
    return Attachment(model)
