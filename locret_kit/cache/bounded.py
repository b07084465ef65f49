"""Face of the bounded cache to transformers: a ``Cache`` that never holds more than ``budget + chunk`` rows per head."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ..backbones.intercept import active_handler
from ..backbones.rope import same_rotation
from ..backbones.states import StatefulCache, States
from ..heads import RetainingHeads
from ..policies import EVIDENCE, Policy
from ..policies.grammar import composed_of, read_once
from ..settings import INT32_MAX, Resolved, RunSettings
from .context import CacheCounters, Context, Pins, Stage
from .due import Schedule
from .forward import TextForward
from .options import CacheOptions
from .pins import pins_of, without
from .second_reading import Kept, to_prompt_positions
from .state import CannotFork, TextState
from .storage.codec import check_storage
from .storage.rows import BoundedLayer


class BoundedCache(StatefulCache):
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
        policy, heads: as they are used. options: these and the settings as given, before prompt and model.
        state: all that belongs to the text, see ``TextState``.
        handler: receives the attention calls of its forwards.

    Raises:
        ValueError: a setting out of range; names the setting, its value and the bound. FileNotFoundError: no such heads.
    """

    check_storage = staticmethod(check_storage)
    state: TextState
    handler: TextForward

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
        options = CacheOptions.of(settings, policy, heads, given, stages)
        self._hold(TextState(options, prompt_length))

    def _hold(self, state: TextState) -> None:
        """Become the face of a text."""
        super().__init__(layers=state.layers)  # type: ignore[arg-type]  # a list of one kind
        self.state, self.handler = state, TextForward(state)
        self.options, self.policy, self.heads = state.options, state.options.policy, state.options.heads

    # ---- binding to a model -------------------------------------------------------------------------------------

    def bind(self, model: PreTrainedModel) -> None:
        """Size the layers for ``model`` at the first forward; later calls only check that the model is the same.

        Raises:
            ValueError: the rows are of another model, or an interrupt left them half written.
        """
        self.state.bind(model)

    @property
    def context(self) -> Context:
        """Constants of the bound cache. Raises RuntimeError: no model is bound yet."""
        return self.state.context

    @property
    def settings(self) -> Resolved:
        """Settings, resolved for this prompt; positions and backend too once a model is bound."""
        return self.state.settings

    @property
    def schedule(self) -> Schedule:
        """Places of the evictions in the text."""
        return self.state.schedule

    @property
    def run(self) -> RunSettings:
        """Settings for another cache like this one: as resolved here, but for the backend, which is chosen anew."""
        return replace(self.settings.run, backend=self.options.settings.backend)

    # ---- pinned text -----------------------------------------------------------------------------------------------

    @property
    def pins(self) -> Pins:
        """Ranges of positions of the text whose tokens are never evicted, ascending; see `pin`."""
        return self.state.pins

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
        self.state.set_pins(pins_of((*self.pins, *((start, end) for start, end in ranges))))

    def unpin(self, start: int, end: int) -> None:
        """Let the policy decide again about the tokens at positions ``[start, end)``, pinned or not."""
        self.state.set_pins(without(self.pins, start, end))

    # ---- copies and other texts ------------------------------------------------------------------------------------

    def fork(self, prompt_length: int | None = None, *, local_len: int | None = None, evidence: bool = False) -> Self:
        """An independent copy that continues with another prompt of the same beginning. It serves a document that is
        read once and asked several questions. Heads, policy and model are shared, the buffers are copied.

        Going on equals a fresh run of the new prompt: bit for bit where the fork was made at a multiple of ``chunk``.

        Args:
            prompt_length: tokens of the new prompt, those read so far included; None leaves it unknown.
            local_len: of the new prompt; this cache's by default.
            evidence: whether the copy's slots sum up the attention that they receive from now on (`attention_received`). Sparse
                prefill has none.

        Raises:
            ValueError: the tokens read so far reach into the new prompt's tail, a fresh run of the new prompt would have evicted
                otherwise so far, or this cache was interrupted.
        """
        self.state.refuse_interrupted()
        # A share of the prompt is a share of the new one.
        settings = replace(self.run, budget=self.settings.share or self.schedule.budget)
        if local_len is not None:
            settings = replace(settings, local_len=local_len)
        if prompt_length is None:
            settings = replace(settings, decode_every=None)
        new = self._like(settings, self.policy.watched() if evidence else self.policy, prompt_length)
        if self.state.layers:  # a model is bound
            self.state.check_fork(new.state, self.state.seen)
            new.state.take_over(self.state)
        new.state.set_pins(self.pins)
        return new

    def with_budget(self, budget: int, *, stabilizers: int | None = None, rereads: bool = True) -> Self:
        """An independent copy with the same rows and another budget, no smaller than its rows: later turns of a
        conversation get room of their own. ``stabilizers``: another number of them, too. ``rereads``: whether a second reading
        stays ahead, if the policy has one.

        Raises:
            ValueError: a budget that needs other rotary frequencies than the rows have, or this cache was
                interrupted.
        """
        self.state.refuse_interrupted()
        settings, policy = replace(self.run, budget=budget), self.policy.at(self.schedule.budget)
        policy = policy if rereads else read_once(policy)
        if stabilizers is not None:
            settings = replace(settings, stabilizers=stabilizers)
        if policy != self.policy:  # blocks that are stored keep their size
            policy = replace(policy, name=composed_of(policy))
        new = self._like(settings, policy, self.schedule.prompt_length)
        new.bind(self.context.model)
        if not same_rotation(self.context.ropes or [], new.context.ropes or []):
            raise CannotFork(
                f"budget={budget}: so many slots are rotated by other frequencies (LongRoPE) than the "
                f"{self.settings.budget} with which the text was read: read it with more, or take fewer for the turns (history)"
            )
        new.state.reread_positions = list(self.state.reread_positions)
        new.state.take_over(self.state)
        new.state.set_pins(self.pins)
        return new

    def _like(self, settings: RunSettings, policy: Policy, prompt_length: int | None) -> Self:
        """An empty cache with other settings."""
        return type(self)(settings, policy, self.heads, prompt_length=prompt_length, stages=self.options.stages)

    def can_take_back(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` tokens, at most those after the prompt and its last one, can be forgotten as though never
        read. They cannot where they were scored by attention or evicted something, or heads differ in length."""
        state = self.state
        reaches_prompt = state.seen - tokens + 1 < (state.schedule.prompt_length or INT32_MAX)
        if tokens < 0 or reaches_prompt or state.states is not None or state.context.evicts_after_forward:
            return False
        # All layers or none: a forward refuses layers that have seen different numbers of tokens.
        return all(rows.can_take_back(tokens) for rows in state.layers)

    def take_back(self, tokens: int) -> bool:
        """Forget the newest ``tokens`` tokens. False, and nothing has changed, where that cannot be (`can_take_back`)."""
        possible = self.can_take_back(tokens)
        for rows in self.state.layers if possible else ():
            rows.take_back(tokens)
        return possible

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A copy for the same prompt: heads, policy and model are shared, all else is copied."""
        memo[id(self)] = new = object.__new__(type(self))
        new._hold(self.state.copy(memo))
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
            self._hold(self.state.for_prompt(prompt_length))
        self.state.clear()

    # ---- what it holds ----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Budget, policy, tokens seen, rows per head and the size of the buffers."""
        rows = sorted({layer.rows for layer in self.bounded})
        return (
            f"BoundedCache(budget={self.settings.budget}, policy={self.policy.name!r}, seen={self.get_seq_length()} tokens, "
            f"rows={'-'.join(str(n) for n in (rows[:1] + rows[1:][-1:])) or 'none yet'}, {self.nbytes / 2**20:.1f} MiB)"
        )

    def __bool__(self) -> bool:
        """False, since Phi-3's ``prepare_inputs_for_generation`` continues without a cache that is true where a text outgrows the
        first factors of LongRoPE; here they are chosen once, and stay."""
        return False

    @property
    def counters(self) -> CacheCounters:
        """Work done on this text."""
        return self.state.counters

    def kept_positions(self, layer: int) -> Kept:
        """Positions (int32, ascending) of the tokens that layer holds now: ``[1, H, rows]``, or where heads differ a list
        of lists; ``kept_positions(layer)[0][h]`` is a head's either way. ``[1, H, 0]`` before the first token.

        Raises:
            RuntimeError: no model is bound yet.
        """
        heads, rows = self.context.spec.layers[layer].n_kv_heads, self.bounded[layer]
        none = torch.empty(1, heads, 0, dtype=torch.int32, device=self.context.model.device)
        kept = rows.kept() if rows.is_initialized else none
        return to_prompt_positions(self.reread_positions, self.schedule.prompt_length or 0, kept)

    def attention_received(self) -> Tensor | None:
        """Attention (float32, ``[seen]``) that the tokens in memory have received so far from themselves and those after, by
        position in the prompt: means of the query heads of each group, summed over key/value heads and the later half of the
        layers. None where no policy sums it up (``fork(evidence=True)`` does).

        Early layers attend by place and form, late ones by what is asked for.
        """
        if EVIDENCE not in self.context.statistics:
            return None
        whole = [rows for rows in self.bounded if rows.statistics and rows.is_initialized]
        total = torch.zeros(self.get_seq_length(), dtype=torch.float32, device=self.context.model.device)
        number = self.context.statistics.index(EVIDENCE)
        for rows in whole[len(whole) // 2 :]:
            sums_HS, at_HS = rows.slots("stats")[number, 0], rows.slots("positions")[0].long()
            total.index_add_(0, at_HS.flatten().to(total.device), sums_HS.flatten().to(total.device))
        if not (again := self.reread_positions):
            return total
        # What was read again counts where it stands in the prompt.
        end = self.schedule.prompt_length or 0
        moved, total[end - len(again) : end] = total[end - len(again) : end].clone(), 0
        return total.index_add_(0, torch.tensor(again, device=total.device), moved)

    @property
    def reread_positions(self) -> list[int]:
        """Positions in the prompt of the tokens that are read in its place, see ``TextState``."""
        return self.state.reread_positions

    @property
    def bounded(self) -> list[BoundedLayer]:
        """The layers, by their type."""
        return self.state.layers

    @property
    def kept_rows(self) -> list[int]:
        """Rows a head holds now (on average where heads differ), per layer."""
        return [layer.rows for layer in self.bounded]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device."""
        return self.state.nbytes

    # ---- what transformers asks -------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[1, H, T, D]`` unchanged; the handler stores them. Raises RuntimeError where the
        model is not attached."""
        # A backbone's attention calls this first. Where no handler takes over, every row would be lost.
        if active_handler() is not self.handler:
            raise RuntimeError("the model of this BoundedCache is not attached: use `with attach(model): ...`")
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, by every layer alike; the backbone's layers are numbered otherwise than the rows."""
        return self.state.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.bounded[0].get_mask_sizes(query_length) if self.layers else (int(query_length), 0)

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Refuse beams: raises ValueError for every ``beam_idx [B]``."""
        raise ValueError("a BoundedCache takes one text: beams are texts of a BatchCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("a BoundedCache takes one text: several are those of a BatchCache")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse rows of a batch: raises ValueError for every index ``[B]``."""
        raise ValueError("a BoundedCache takes one text: several are those of a BatchCache")

    def _states(self) -> States | None:
        return self.state.states
