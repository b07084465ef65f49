"""Face of the bounded cache to transformers: a ``Cache`` that never holds more than ``budget + chunk`` rows per head.

The model may be fed in pieces of any size: evictions happen at boundaries that the prompt and ``chunk`` fix (see
``due``). So ``model.generate`` with any ``prefill_chunk_size`` and the kit's own prefill agree exactly. There are two
exceptions: ``clipped`` positions follow the newest token of a piece, and rows in 4 or 2 bits are rounded after a piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Self

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from locret_kernels.enter import HeadProduct

from ..backbones.decoder_attention import Arguments, Handler, LayerOperations, Softmax, same_rotation
from ..backbones.intercept import active_handler
from ..backbones.libraries import unwrapped
from ..backbones.probe import describe
from ..backbones.spec import StatefulCache, States
from ..heads import RetainingHeads
from ..policies import Policy
from ..policies.grammar import composed_of
from ..settings import INT32_MAX, RunSettings
from . import step, view
from .context import CacheCounters, Context, Pins, Stage, make_layers
from .options import CacheOptions, checked_arguments
from .stages import stages_of
from .storage.codec import BITS, Scratch, check_storage
from .storage.rows import BoundedLayer, copy_rows

# ---- conditions under which a copy of a cache may go on with another prompt of the same beginning -------------------


class CannotFork(ValueError):
    """A copy would hold other rows than a fresh run of that prompt."""


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


# ---- face of the bounded cache to transformers ----


class BoundedCache(StatefulCache, Handler):
    """A key/value cache of fixed size for ``model.generate`` and for the kit's own prefill.

    It takes one text, in pieces of any length, inside ``with attach(model)``::

        cache = BoundedCache(512, "snapkv", prompt_length=ids.shape[1])
        with attach(model):
            out = model.generate(ids, **{CACHE: cache}, prefill_chunk_size=512)

    Args:
        settings: the budget, or a ``RunSettings``. A budget is a number of slots per key/value head and layer that an
            eviction leaves, everything counted, or a share of the prompt as a float. If the policy gives layers or
            heads different numbers, it is their mean.
        policy: a policy's name or expression, or a ``Policy``. Default: the published policy of ``heads``, or locret.
        heads: retaining heads, or their folder, file or Hub repository, for policies that score with heads. The first
            forward moves them to the model's device and dtype. Their published settings are the defaults.
        prompt_length: tokens of the prompt. If it is given, the last ``local_len`` of them are not evicted before
            decoding, and the eviction before them protects no stabilizers (Locret, algorithm 1). Otherwise the prompt
            has no tail, and every eviction protects the stabilizers. Another length than the prompt's is not
            noticed: the pieces of a prompt and the tokens of an answer look alike.
        stages: further stages (``cache.context.Stage``), after those of the policy; forks share them.
        **given: fields of ``RunSettings`` by name, in place of ``settings``.

    Attributes:
        terms: the settings as given, before prompt and model.
        settings: resolved for this prompt; positions and backend too once a model is bound.
        context: constants of the bound cache.
        counters: work done on this text.
        scratch: the buffers through which rows in few bits are read.
        unfinished: whether a forward has begun that not every layer has finished. waiting: evictions for its end.
        pins: ranges of positions of the text whose tokens are never evicted, ascending; see `pin`.
        reread_positions: positions in the prompt of the tokens that are read in its place, the tail's included; empty
            where the prompt is read once, or not yet for the second time.

    Raises:
        ValueError: a setting out of range; names the setting, its value and the bound. FileNotFoundError: no such heads.
    """

    check_storage = staticmethod(check_storage)
    fixed: Callable[[int], step.StaticStep] | None = None
    """The place of a layer's token while it is decoded with fixed shapes (see ``runtime.drivers.graph``)."""
    input_BTC: Tensor | HeadProduct | None = None
    """Normed input of the layer whose attention is to come, or its retaining head's product with it."""

    def __init__(
        self,
        settings: RunSettings | int | float | None = None,
        policy: str | Policy | None = None,
        heads: RetainingHeads | str | Path | None = None,
        *,
        prompt_length: int | None = None,
        stages: Sequence[Stage] = (),
        **given: object,
    ) -> None:
        super().__init__(layers=[])
        self.scratch = Scratch()
        self.unfinished = False
        self.waiting: list[step.Eviction] = []
        self.options = CacheOptions.of(settings, policy, heads, given)
        self.policy, self.heads = self.options.policy, self.options.heads
        self.settings, self.schedule = self.options.at(prompt_length)
        self.pins: Pins = view.first_pins(self.settings)
        self.counters = CacheCounters()
        self._stages = tuple(stages)
        self._context: Context | None = None
        self.last_hidden: Tensor | None = None
        self.reread_positions: list[int] = []

    # ---- binding to a model -------------------------------------------------------------------------------------

    def bind(self, model: PreTrainedModel) -> None:
        """Size the layers for ``model`` at the first forward; later calls only check that the model is the same.

        Raises:
            ValueError: the rows are of another model, or an interrupt left them half written.
        """
        self.refuse_interrupted()
        model = unwrapped(model)
        if self._context is None:
            context = Context.of(model, self.policy, self.schedule, self.heads, self.settings, self.counters)
            view.check_room(context, self.pins)
            self._context = replace(context, pins=self.pins, stages=(*stages_of(context.policy), *self._stages))
            self.settings = context.settings
            self.layers.extend(make_layers(self._context, self.scratch))
            self.states = States.of(model, context.spec)
        elif self._context.model is not model and self._context.spec != describe(model).spec:
            raise ValueError("this cache already holds rows of another model")

    @property
    def context(self) -> Context:
        """Constants of the bound cache.

        Raises:
            RuntimeError: no model is bound yet.
        """
        if self._context is None:
            raise RuntimeError("this cache has met no model yet: bind(model) it, or run a forward")
        return self._context

    @property
    def backend(self) -> str:
        """Name of the backend, once bound."""
        return self.context.backend.name

    @property
    def run(self) -> RunSettings:
        """Settings for another cache like this one: as resolved here, but for the backend, which is chosen anew."""
        return replace(self.settings.run, backend=self.options.settings.backend)

    # ---- pinned text -----------------------------------------------------------------------------------------------

    def pin(self, start: int, end: int) -> None:
        """Never evict the tokens at positions ``[start, end)`` of the text, read already or yet to come; what of them was
        evicted stays gone. They are part of the budget, and rank above all that the policy protects. Where slots are merged
        they take nothing over. Forks and copies inherit them, `reset` forgets all but the first tokens of ``protect``.

        Raises:
            ValueError: not 0 <= start < end; more tokens are pinned than some layer has room for besides its
                stabilizers, the prompt's tail and one slot more. Before the first forward, `bind` raises that.
        """
        if not 0 <= start < end:
            raise ValueError(f"pin({start}, {end}): start must be at least 0, and end above it")
        self.pin_all([(start, end)])

    def pin_all(self, ranges: Iterable[Sequence[int]]) -> None:
        """``pin`` of several ranges at once."""
        self._set_pins(view.pins_of((*self.pins, *((start, end) for start, end in ranges))))

    def unpin(self, start: int, end: int) -> None:
        """Let the policy decide again about the tokens at positions ``[start, end)``, pinned or not."""
        self._set_pins(view.without(self.pins, start, end))

    def _set_pins(self, pins: Pins) -> None:
        if self._context is not None:
            at = view.in_rows(pins, self.reread_positions, self.schedule.prompt_length or 0)
            # Before a second reading all pins count, whatever rows there are: its passages must hold them.
            view.check_room(self._context, at, () if self.needs_reread else self.bounded)
            self._context = replace(self._context, pins=at)
        self.pins = pins

    # ---- two readings of the prompt's tail -------------------------------------------------------------------------

    @property
    def needs_reread(self) -> bool:
        """Whether the prompt's tail is yet to be read for the second time."""
        s = self.schedule
        asked = self.policy.reread is not None and any(self.context.budgets)  # windows alone hold no index to the text
        return asked and not self.reread_positions and (s.prompt_length or 0) > s.budget

    def start_reread(self) -> None:
        """Begin the second reading, if the policy has one and the whole prompt was read; otherwise do nothing. Call it after
        each piece of the prompt. ``get_seq_length`` then falls by the number of tokens that are to be read again."""
        total, reread = self.get_seq_length(), self.policy.reread
        if reread is not None and total == self.schedule.prompt_length and self.needs_reread:
            self.reread_positions = view.choose_passages(self.context, reread, self.bounded, total)
            self._set_pins(self.pins)
            self.last_hidden = None

    def prompt_positions(self, start: int, end: int) -> Sequence[int]:
        """Positions in the prompt of the tokens that are fed as its tokens ``start`` to ``end``."""
        reread = self.reread_positions  # read in the place of the prompt's last ones
        first = (self.schedule.prompt_length or 0) - len(reread)
        return reread[start - first : end - first] if reread and start >= first else range(start, end)

    # ---- copies and other texts ------------------------------------------------------------------------------------

    def fork(self, prompt_length: int | None = None, *, local_len: int | None = None) -> Self:
        """An independent copy that continues with another prompt of the same beginning. It serves a document that is
        read once and asked several questions. Heads, policy and model are shared, the buffers are copied.

        Going on equals a fresh run of the new prompt: bit for bit where the fork was made at a multiple of ``chunk``.

        Args:
            prompt_length: tokens of the new prompt, those read so far included; None leaves it unknown.
            local_len: of the new prompt; this cache's by default.

        Raises:
            ValueError: the tokens read so far reach into the new prompt's tail, a fresh run of the new prompt would have evicted
                otherwise so far, or this cache was interrupted.
        """
        self.refuse_interrupted()
        # A share of the prompt is a share of the new one.
        settings = replace(self.run, budget=self.settings.share or self.schedule.budget)
        if local_len is not None:
            settings = replace(settings, local_len=local_len)
        if prompt_length is None:
            settings = replace(settings, decode_every=None)
        new = type(self)(settings, self.policy, self.heads, prompt_length=prompt_length, stages=self._stages)
        if self._context is None:
            new.pins = self.pins
            return new
        self.check_fork(new, self.get_seq_length())
        new._take_over(self)
        new._set_pins(self.pins)
        return new

    def check_fork(self, new: BoundedCache, seen: int) -> None:
        """Bind a cache of another prompt, and raise CannotFork where after ``seen`` tokens, which both begin with, it would not
        hold what this one holds then."""
        if new.schedule.body is not None and seen > new.schedule.body:
            raise CannotFork(
                f"prompt_length={new.schedule.prompt_length}: {seen} tokens are read already, more than the "
                f"{new.schedule.body} before its tail"
            )
        # Decoded tokens are no part of another prompt.
        if self.schedule.decoding(seen):
            raise CannotFork("this cache has decoded already: fork it before")
        new.bind(self.context.model)
        check_past(self.context, new.context, seen)
        # A prompt that keeps more queries would have kept some that are gone.
        kept, wanted = ([rows.recent for rows in cache.bounded] for cache in (self, new))
        if seen and kept != wanted:
            raise CannotFork(f"{max(kept)} queries are kept here, and {max(wanted)} in a prompt of that length")

    def with_budget(self, budget: int, *, stabilizers: int | None = None) -> Self:
        """An independent copy with the same rows and another budget, larger than its rows: later turns of a
        conversation get room of their own. ``stabilizers``: another number of them, too.

        Raises:
            ValueError: a budget that needs other rotary frequencies than the rows have, or this cache was
                interrupted.
        """
        self.refuse_interrupted()
        settings, policy = replace(self.run, budget=budget), self.policy.at(self.schedule.budget)
        if stabilizers is not None:
            settings = replace(settings, stabilizers=stabilizers)
        if policy != self.policy:  # blocks that are stored keep their size
            policy = replace(policy, name=composed_of(policy))
        new = type(self)(settings, policy, self.heads, prompt_length=self.schedule.prompt_length, stages=self._stages)
        new.bind(self.context.model)
        if not same_rotation(self.context.ropes or [], new.context.ropes or []):
            raise CannotFork(
                f"budget={budget}: so many slots are rotated by other frequencies (LongRoPE) than the "
                f"{self.settings.budget} with which the text was read: read it with more, or take fewer for the turns (history)"
            )
        new.reread_positions = list(self.reread_positions)
        new._take_over(self)
        new._set_pins(self.pins)
        return new

    def _take_over(self, other: BoundedCache) -> None:
        """Become a copy of another cache's rows."""
        for mine, theirs in zip(self.bounded, other.bounded, strict=True):
            copy_rows(mine, theirs)
        self.states = deepcopy(other.states)
        # Their numbers and not the objects, which the context holds too.
        vars(self.counters).update(vars(other.counters))
        vars(self.context.recalls).update(vars(other.context.recalls))
        self.last_hidden = None if other.last_hidden is None else other.last_hidden.clone()

    def move(self, context: Context, layers: list[BoundedLayer]) -> None:
        """Go on with the same rows elsewhere."""
        self._context = context
        self.layers[:] = layers

    def take_back(self, tokens: int) -> bool:
        """Forget the newest ``tokens`` tokens after the prompt, as though they had never been read. False, and nothing has
        changed, where that cannot be: they were scored by attention or evicted something, or heads differ in length."""
        reaches_prompt = self.get_seq_length() - tokens < (self.schedule.prompt_length or INT32_MAX)
        if reaches_prompt or self.states is not None or self.context.evicts_after_forward:
            return False
        # All layers or none: a forward refuses layers that have seen different numbers of tokens.
        if not all(rows.can_take_back(tokens) for rows in self.bounded):
            return False
        for rows in self.bounded:
            rows.take_back(tokens)
        return True

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A copy for the same prompt: heads, policy and model are shared, all else is copied."""
        own = self._context
        shared = (self.heads, self.policy, self.policy.merge, own and own.model, own and own.folded)
        memo.update({id(one): one for one in shared})
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(deepcopy(vars(self), memo))
        return new

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a BoundedCache holds its model and is not pickled: fork() and copy.deepcopy() copy its rows")

    def reset(self, prompt_length: int | None = None) -> None:
        """Forget the text. The cache then reads another one in the same buffers, as a new cache would.

        Args:
            prompt_length: tokens of the next prompt; None where they are unknown, as in a cache that is made without.
                Buffers whose size depends on it are made anew.

        Raises:
            ValueError: a length that the settings do not allow; the cache is then unchanged.
        """
        if prompt_length != self.schedule.prompt_length:
            self._resize(prompt_length)
        super().reset()
        if self.states is not None:
            self.states.cache.reset()
        self.counters.clear()
        if self._context is not None:
            self._context.recalls.clear()
        self.last_hidden, self.reread_positions, self.unfinished, self.waiting = None, [], False, []
        self._set_pins(view.first_pins(self.settings))

    def _resize(self, prompt_length: int | None) -> None:
        """Settings, context and layers for a prompt of another length; buffers whose size stays are the same."""
        # Into another object first: what cannot be met leaves this one as it was.
        settings, schedule = self.options.at(prompt_length)
        new = object.__new__(type(self))
        vars(new).update(vars(self) | {"settings": settings, "schedule": schedule, "pins": view.first_pins(settings)})
        if self._context is not None:
            vars(new).update(_context=None, layers=[], unfinished=False)
            new.bind(self._context.model)
            pairs = zip(self.bounded, new.bounded, strict=True)
            new.layers = [
                was if (was.capacity, was.recent) == (now.capacity, now.recent) else now for was, now in pairs
            ]
        vars(self).update(vars(new))

    def __repr__(self) -> str:
        """Budget, policy, tokens seen, rows per head and the size of the buffers."""
        rows = sorted({layer.rows for layer in self.bounded})
        return (
            f"BoundedCache(budget={self.settings.budget}, policy={self.policy.name!r}, seen={self.get_seq_length()} tokens, "
            f"rows={'-'.join(str(n) for n in (rows[:1] + rows[1:][-1:])) or 'none yet'}, {self.nbytes / 2**20:.1f} MiB)"
        )

    def kept_positions(self, layer: int) -> view.Kept:
        """Positions (int32, ascending) of the tokens that layer holds now: ``[1, H, rows]``, or where heads differ a list
        of lists; ``kept_positions(layer)[0][h]`` is a head's either way. ``[1, H, 0]`` before the first token.

        Raises:
            RuntimeError: no model is bound yet.
        """
        heads, rows = self.context.spec.layers[layer].n_kv_heads, self.bounded[layer]
        none = torch.empty(1, heads, 0, dtype=torch.int32, device=self.context.model.device)
        kept = rows.kept() if rows.is_initialized else none
        return view.in_prompt(self.reread_positions, self.schedule.prompt_length or 0, kept)

    # ---- a forward --------------------------------------------------------------------------------------------------

    @property
    def wants_unrotated(self) -> bool:  # type: ignore[override]
        """Whether q and k come before RoPE."""
        return self.context.ropes is not None

    def begin(self, model: PreTrainedModel, arguments: Arguments) -> Arguments:
        self.bind(model)
        self.input_BTC = None  # an interrupt may have left one
        if (
            self.policy.needs_logits and "logits_to_keep" in arguments
        ):  # Gemma 4 leaves other tokens out of its last layers
            arguments = {**arguments, "logits_to_keep": 0}
        return checked_arguments(arguments, self.context, self.get_seq_length(), self.get_mask_sizes(0, 0)[0])

    def operations(self, x: Tensor) -> LayerOperations | None:
        """Operations of a layer besides attention, for hidden states like ``x [B, T, C]``. With folded scores they
        also note the layer's input."""
        made, folded = self.context.backend.operations(x), self.context.folded
        return made if made is None or folded is None else made._replace(enter=partial(setattr, self, "input_BTC"))

    @torch.no_grad()
    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of the newest tokens over a layer's rows, their own included."""
        rows = self.bounded[layer]
        rows.softmax = softmax
        return step.attend_again(self.context, rows, q_BQTD)

    @torch.no_grad()
    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of new tokens; stores them and evicts where the schedule says.

        Raises:
            ValueError: several texts.
        """
        if len(q_BQTD) != 1:
            raise ValueError(f"batch={len(q_BQTD)} must be 1: a BoundedCache takes one text, a BatchCache several")
        ctx = self.context
        score, self.input_BTC = view.folded_scores(ctx, layer, self.input_BTC, q_BQTD.shape[2]), None
        if self.fixed is not None:  # evictions and counts are then the graph decoder's
            self.bounded[layer].softmax = softmax
            return step.read_block(ctx, self.bounded[layer], q_BQTD, k_BHTD, v_BHTD, self.fixed(layer), score)
        q_BQTD, k_BHTD, v_BHTD = step.in_model_type(ctx, q_BQTD, k_BHTD, v_BHTD)
        rows = self.open(layer, softmax, k_BHTD, v_BHTD)
        if layer == 0:
            self.make_room(q_BQTD.shape[2])
        out = step.read_tokens(ctx, rows, q_BQTD, k_BHTD, v_BHTD, score, self.waiting)
        self.close(layer)
        return out

    def open(self, layer: int, softmax: Softmax, k_BHTD: Tensor, v_BHTD: Tensor) -> BoundedLayer:
        """The rows of a layer, before a forward's new tokens enter it. Keys and values tell sizes and dtype."""
        rows, ctx = self.bounded[layer], self.context
        rows.softmax = softmax
        rows.update(k_BHTD, v_BHTD)
        if layer == 0:
            ctx.tables.clear()  # layers of one forward share tables
            ctx.block_scores.clear()
            if self.needs_reread and rows.seen >= (self.schedule.prompt_length or 0):
                raise RuntimeError(
                    f"policy={self.policy.name!r} reads the end of the prompt twice, which locret_kit's own prefill does and "
                    "model.generate does not: use locret_kit.runtime.session.Answer"
                )
        # Not undone by an exception: a cache that stopped between two layers must not be read on.
        self.unfinished = True
        return rows

    def make_room(self, tokens: int) -> None:
        """Evict before a forward of ``tokens`` tokens, in layers that evict together and are full. Scores of remembered
        queries wait for the attention of their layer."""
        ctx = self.context
        ready = [rows for rows in self.bounded if rows.is_initialized and not rows.recent]
        step.make_room(ctx, [rows for rows in ready if step.evicts_together(ctx, rows)], tokens)

    def close(self, layer: int) -> None:
        """Take note that a forward's new tokens are in a layer."""
        self.unfinished = layer + 1 < len(self.layers) or self.in_blocks or bool(self.waiting)

    @property
    def in_blocks(self) -> bool:  # type: ignore[override]
        """Whether ``read`` must be called after every forward, and no forward may cross a boundary."""
        return self._context is not None and self._context.evicts_after_forward

    def blocks(self, tokens: int) -> list[int]:
        """Lengths of the blocks that the next ``tokens`` tokens are read in."""
        return list(self.schedule.blocks(self.get_seq_length(), tokens))

    @torch.no_grad()
    def read(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Score the block that was just read by its tokens' final hidden states where the policy does, then evict where that is
        due."""
        ctx, began = self.context, time.perf_counter()
        if self.policy.needs_logits:
            self.last_hidden = view.score_by_logits(ctx, self.bounded, hidden_BTE, ids_BT, self.last_hidden)
        ctx.counters.score_s += time.perf_counter() - began
        # Only now: in a forward, later layers read rows that earlier ones have written.
        step.evict_if_due(ctx, self.bounded)
        self.unfinished = False

    # ---- all layers together, as transformers and reports ask -------------------------------------------------------

    def __bool__(self) -> bool:
        """False, since Phi-3's ``prepare_inputs_for_generation`` continues without a cache that is true where a text outgrows the
        first factors of LongRoPE; here they are chosen once, and stay."""
        return False

    def refuse_interrupted(self) -> None:
        """Raise ValueError where a forward ended in the middle: layers have seen different numbers of tokens then."""
        seen = sorted({rows.seen for rows in self.bounded})
        if self.unfinished or len(seen) > 1:
            raise ValueError(
                f"this cache was interrupted inside a forward, after {seen[0]} to {seen[-1]} tokens: reset() it and read again"
            )

    @torch.no_grad()
    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Run the evictions that wait for the forward's end, and check that every layer has seen its tokens.

        Raises:
            ValueError: a layer has not.
        """
        if len({rows.seen for rows in self.bounded}) == 1:
            self.evict_waiting()
        # A backbone that computes some attention by itself leaves a layer behind.
        seen = {rows.seen for rows in self.bounded}
        if self.unfinished or len(seen) > 1:
            raise ValueError(
                f"layers have seen {min(seen)} to {max(seen)} tokens of this text: some attention did not reach the cache"
            )

    def evict_waiting(self) -> None:
        """Run the evictions that wait for the end of a forward, in all layers."""
        if self.waiting:
            step.evict(self.context, self.waiting)
            self.waiting, self.unfinished = [], False

    @property
    def bounded(self) -> list[BoundedLayer]:
        """The layers, by their type."""
        return self.layers  # type: ignore[return-value]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[1, H, T, D]`` unchanged; ``attend`` stores them. Raises RuntimeError where the
        model is not attached."""
        # A backbone's attention calls this first. Where no handler takes over, every row would be lost.
        if active_handler() is not self:
            raise RuntimeError(
                "a BoundedCache was given to a model that is not attached: use `with attach(model): ...`"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, by every layer alike; the backbone's layers are numbered otherwise than the rows."""
        return self.bounded[0].get_seq_length() if self.layers else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.bounded[0].get_mask_sizes(query_length) if self.layers else (int(query_length), 0)

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Refuse beams: raises ValueError for every ``beam_idx [B]``."""
        raise ValueError("a BoundedCache takes one text: beams are texts of a BatchCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("a BoundedCache takes one text: several are those of a BatchCache")

    @property
    def kept_rows(self) -> list[int]:
        """Rows a head holds now (on average where heads differ), per layer."""
        return [layer.rows for layer in self.bounded]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device."""
        states = 0 if self.states is None else self.states.nbytes
        return sum(layer.nbytes for layer in self.bounded) + self.scratch.nbytes + states

    @property
    def host_nbytes(self) -> int:
        """Bytes of the stores in the host's memory, where evicted slots may come back."""
        return sum(layer.store.host_bytes for layer in self.bounded if layer.store is not None)
