"""State of one text: everything that a copy of a cache copies, and that a reset forgets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..backbones.handlers import Softmax
from ..backbones.probe import describe
from ..backbones.rope import same_rotation
from ..backbones.states import States
from ..backbones.wrapped import unwrapped
from . import step, view
from .context import CacheCounters, Context, Pins, RecallCounters, make_layers
from .options import CacheOptions, loses_state
from .pins import check_room, first_pins
from .second_reading import choose_passages, to_cache_positions
from .stages import stages_of
from .storage.codec import BITS, Scratch
from .storage.exports import copy_rows
from .storage.rows import BoundedLayer


class CannotFork(ValueError):
    """A copy would hold other rows than a fresh run of that prompt."""


class TextState:
    """State of one text in a bounded cache.

    Args:
        options: settings, policy and heads of the cache. prompt_length: tokens of the prompt; None where it is unknown.

    Attributes:
        settings: resolved for this prompt; positions and backend too once a model is bound.
        schedule: places of its evictions.
        layers: rows of every layer; empty before a model is bound.
        states: of layers without attention; None where the backbone has none, or is not known yet.
        scratch: the buffers through which rows in few bits are read.
        counters: work done on this text.
        pins: ranges of positions of the text whose tokens are never evicted, ascending.
        reread_positions: positions in the prompt of the tokens that are read in its place, the tail's included; empty
            where the prompt is read once, or not yet for the second time.
        last_hidden: final hidden state that judges the next token, where the policy scores tokens by their probability.
        unfinished: whether a forward has begun that not every layer has finished. waiting: evictions for its end.

    Raises:
        ValueError: a prompt that the settings do not allow.
    """

    def __init__(self, options: CacheOptions, prompt_length: int | None) -> None:
        self.options = options
        self.settings, self.schedule = options.at(prompt_length)
        self.layers: list[BoundedLayer] = []
        self.states: States | None = None
        self.scratch = Scratch()
        self.counters = CacheCounters()
        self.pins: Pins = first_pins(self.settings)
        self.reread_positions: list[int] = []
        self.last_hidden: Tensor | None = None
        self.unfinished = False
        self.waiting: list[step.Eviction] = []
        self._context: Context | None = None

    # ---- the model ---------------------------------------------------------------------------------------------------

    def bind(self, model: PreTrainedModel) -> None:
        """See ``BoundedCache.bind``."""
        self.refuse_interrupted()
        model, own = unwrapped(model), self.options
        if self._context is None:
            context = Context.of(model, own.policy, self.schedule, own.heads, self.settings, self.counters)
            check_room(context, self.pins)
            stages = *stages_of(context.policy), *own.stages
            self._context = replace(context, pins=self.pins, stages=stages, own_stages=len(own.stages))
            self.settings = context.settings
            self.layers += make_layers(self._context, self.scratch)
            self.states = States.of(model, context.spec)
        elif self._context.model is not model and self._context.spec != describe(model).spec:
            raise ValueError("this cache already holds rows of another model")

    @property
    def context(self) -> Context:
        """Constants of the bound text. Raises RuntimeError: no model is bound yet."""
        if self._context is None:
            raise RuntimeError("this cache has met no model yet: bind(model) it, or run a forward")
        return self._context

    def change_context(self, **changes: object) -> None:
        """Replace fields of the context, if a model is bound."""
        if self._context is not None:
            self._context = replace(self._context, **changes)  # type: ignore[arg-type]

    def share_rotations(self, others: Iterable[TextState]) -> None:
        """Take rotations, and their tables, from a text that rotates alike: texts that share them are decoded together."""
        for other in others:
            if same_rotation(self.context.ropes or [], other.context.ropes or []):
                return self.change_context(ropes=other.context.ropes, tables=other.context.tables)

    # ---- copies and other texts ----------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # a copy that is made in inference mode is written outside of it too
    def copy(self, memo: dict[int, object] | None = None) -> TextState:
        """An independent copy: heads, policy and model are shared, all else is copied. ``memo``: see ``copy.deepcopy``."""
        own, options = self._context, self.options
        shared = (options, options.heads, options.policy, options.policy.merge, own and own.model, own and own.folded)
        memo, new = {} if memo is None else memo, copy(self)
        memo.update({id(one): one for one in shared} | {id(self): new})
        for name, value in self.__dict__.items():
            setattr(new, name, deepcopy(value, memo))
        return new

    __deepcopy__ = copy

    def take_over(self, other: TextState, share: tuple[int, int] = (0, 1)) -> None:
        """Become a copy of another text's rows, or of a share of its key/value heads: the first of two is ``(0, 2)``."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            copy_rows(mine, theirs, share)
        with torch.inference_mode(False):
            self.states = deepcopy(other.states)
        self.set_counters(replace(other.counters), replace(other.context.recalls))
        self.last_hidden = None if other.last_hidden is None else other.last_hidden.clone()

    def clear(self) -> None:
        """Forget the text. Another one of this length may be read into the same buffers."""
        for rows in self.layers:
            rows.reset()
        if self.states is not None:
            self.states.cache.reset()
        self.set_counters(CacheCounters(), RecallCounters())
        self.last_hidden, self.reread_positions, self.unfinished, self.waiting = None, [], False, []
        self.set_pins(first_pins(self.settings))

    def for_prompt(self, prompt_length: int | None) -> TextState:
        """State for a prompt of another length, which shares the buffers whose size stays. This one is unchanged."""
        new = TextState(self.options, prompt_length)
        if self._context is not None:
            new.scratch = self.scratch
            new.bind(self._context.model)
            for number, (was, now) in enumerate(zip(self.layers, new.layers, strict=True)):
                if (was.capacity, was.recent) == (now.capacity, now.recent):
                    new.layers[number] = was
        return new

    def set_counters(self, counters: CacheCounters, recalls: RecallCounters | None = None) -> None:
        """Count on from here."""
        self.counters = counters
        self.change_context(counters=counters, recalls=recalls or RecallCounters())

    def check_fork(self, new: TextState, seen: int) -> None:
        """Bind the state of another prompt, and raise CannotFork where after ``seen`` tokens, which both begin with, it would not
        hold what this one holds then."""
        if new.schedule.body is not None and seen > new.schedule.body:
            raise CannotFork(
                f"prompt_length={new.schedule.prompt_length}: {seen} tokens are read already, more than the "
                f"{new.schedule.body} before its tail"
            )
        # Decoded tokens are no part of another prompt.
        if self.schedule.decoding(seen):
            raise CannotFork("this cache has decoded already: fork it before")
        left = (new.schedule.prompt_length or 0) - seen
        if not self.context.description.in_pieces and seen and left > 1:
            raise CannotFork(loses_state(left, seen))
        new.bind(self.context.model)
        check_past(self.context, new.context, seen)
        # A prompt that keeps more queries would have kept some that are gone.
        kept, wanted = ([rows.recent for rows in state.layers] for state in (self, new))
        if seen and kept != wanted:
            raise CannotFork(f"{max(kept)} queries are kept here, and {max(wanted)} in a prompt of that length")

    def refuse_interrupted(self) -> None:
        """Raise ValueError where a forward ended in the middle: layers have seen different numbers of tokens then."""
        seen = sorted({rows.seen for rows in self.layers})
        if self.unfinished or len(seen) > 1:
            raise ValueError(
                f"this cache was interrupted inside a forward, after {seen[0]} to {seen[-1]} tokens: reset() it and read again"
            )

    # ---- pinned text ---------------------------------------------------------------------------------------------------

    def set_pins(self, pins: Pins) -> None:
        """Pin these positions alone. Raises ValueError: a layer has no room for them."""
        if self._context is not None:
            reread, length = self.reread_positions, self.schedule.prompt_length or 0
            at = to_cache_positions(pins, reread, length)
            # Before a second reading all pins count, whatever rows there are: its passages must hold them.
            check_room(self._context, at, () if self.needs_reread else self.layers)
            self.change_context(pins=at, first=length - len(reread) if reread else 0)
        self.pins = pins

    # ---- two readings of the prompt's tail -----------------------------------------------------------------------------

    @property
    def needs_reread(self) -> bool:
        """Whether the prompt's tail is yet to be read for the second time."""
        s = self.schedule
        # Windows alone hold no index to the text.
        asked = self.options.policy.reread is not None and any(self.context.budgets)
        return asked and not self.reread_positions and (s.prompt_length or 0) > s.budget

    def start_reread(self) -> None:
        """Begin the second reading, if the policy has one and the whole prompt was read; otherwise do nothing. Call it after
        each piece of the prompt. ``seen`` then falls by the number of tokens that are to be read again."""
        reread = self.options.policy.reread
        if reread is not None and self.seen == self.schedule.prompt_length and self.needs_reread:
            self.reread_positions = choose_passages(self.context, reread, self.layers, self.seen)
            self.set_pins(self.pins)
            self.last_hidden = None
            if self.states is not None:
                self.states.cache.reset()

    def prompt_positions(self, start: int, end: int) -> Sequence[int]:
        """Positions in the prompt of the tokens that are fed as its tokens ``start`` to ``end``."""
        reread, length = self.reread_positions, self.schedule.prompt_length or 0
        # They are read in the place of the prompt's last ones; later turns follow the prompt.
        first = length - len(reread)
        return reread[start - first : end - first] if first <= start < length else range(start, end)

    # ---- a forward -----------------------------------------------------------------------------------------------------

    def open(self, layer: int, softmax: Softmax, k_BHTD: Tensor, v_BHTD: Tensor) -> BoundedLayer:
        """The rows of a layer, before a forward's new tokens enter it. Keys and values tell sizes and dtype."""
        rows, ctx = self.layers[layer], self.context
        rows.softmax = softmax
        rows.update(k_BHTD, v_BHTD)
        if layer == 0:
            ctx.tables.clear()  # layers of one forward share tables
            ctx.block_scores.clear()
            if self.needs_reread and rows.seen >= (self.schedule.prompt_length or 0):
                raise RuntimeError(
                    f"policy={ctx.policy.name!r} reads the end of the prompt twice, which locret_kit's own prefill does and "
                    "model.generate does not: use locret_kit.runtime.session.Answer"
                )
        # Not undone by an exception: a cache that stopped between two layers must not be read on.
        self.unfinished = True
        return rows

    def make_room(self, tokens: int) -> None:
        """Evict before a forward of ``tokens`` tokens, in layers that evict together and are full. Scores of remembered
        queries wait for the attention of their layer."""
        ctx = self.context
        ready = [rows for rows in self.layers if rows.is_initialized and not rows.recent]
        step.make_room(ctx, [rows for rows in ready if step.evicts_together(ctx, rows)], tokens)

    def close(self, layer: int) -> None:
        """Take note that a forward's new tokens are in a layer."""
        more = layer + 1 < len(self.layers) or self.context.evicts_after_forward
        self.unfinished = more or bool(self.waiting)

    def evict_waiting(self) -> None:
        """Run the evictions that wait for the end of a forward, in all layers."""
        if self.waiting:
            step.evict(self.context, self.waiting)
            self.waiting, self.unfinished = [], False

    def read(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Score the block that was just read by its tokens' final hidden states where the policy does, then evict where that is
        due."""
        ctx, began = self.context, time.perf_counter()
        if ctx.policy.score.needs_logits:
            self.last_hidden = view.score_by_logits(ctx, self.layers, hidden_BTE, ids_BT, self.last_hidden)
        ctx.counters.score_s += time.perf_counter() - began
        # Only now: in a forward, later layers read rows that earlier ones have written.
        step.evict_if_due(ctx, self.layers)
        self.unfinished = False

    # ---- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Tokens seen, by every layer alike."""
        return self.layers[0].seen if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device."""
        states = 0 if self.states is None else self.states.nbytes
        return sum(layer.nbytes for layer in self.layers) + self.scratch.nbytes + states

    @property
    def host_nbytes(self) -> int:
        """Bytes of the stores in the host's memory, where evicted slots may come back."""
        return sum(layer.store.host_bytes for layer in self.layers if layer.store is not None)


def check_past(old: Context, new: Context, seen: int) -> None:
    """Raise CannotFork where a run of ``new`` would not hold what ``old`` holds after ``seen`` tokens."""
    if not same_rotation(old.ropes or [], new.ropes or []):
        raise CannotFork("a prompt of that length is rotated by other frequencies (LongRoPE)")
    if new.policy.keeps_everything:
        return
    if old.settings.kv_bits in BITS and new.schedule.capacity < old.schedule.capacity:
        raise CannotFork(
            f"prompt_length={new.schedule.prompt_length}: rows in {old.settings.kv_bits} bits need the room of the longer prompt"
        )
    # Integers alone: the evictions of both runs so far, simulated once for layers of equal budgets.
    earlier, later = cache(partial(old.schedule.evictions, seen)), cache(partial(new.schedule.evictions, seen))
    for i, (mine, theirs, window) in enumerate(zip(old.budgets, new.budgets, old.spec.windows, strict=True)):
        before, after = earlier(mine), later(theirs)
        if window is None and before != after:
            raise CannotFork(
                f"prompt_length={new.schedule.prompt_length}: after {seen} tokens a fresh run would have evicted "
                f"{len(after)} times, this cache {len(before)} times or otherwise"
            )
        if mine != theirs:
            raise CannotFork(f"layer {i} has a budget of {mine} here and of {theirs} in a prompt of that length")
