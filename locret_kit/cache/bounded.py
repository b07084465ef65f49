"""A transformers ``Cache`` that never holds more than ``budget + chunk`` rows of a key/value head.

The model may be fed in pieces of any size: evictions happen at boundaries that the prompt and ``chunk`` fix (see
``schedule``), so ``model.generate`` with any ``prefill_chunk_size`` and the kit's own prefill agree exactly (but for ``clipped``
positions, which follow the newest token of a piece).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from locret_kernels.backend import choose

from ..backbones.families import BackboneSpec, has_adapter, require_adapter, ropes_of, spec_of, text_config
from ..backbones.intercept import active_handler
from ..backbones.rope import Rope
from ..policies.base import Entry, Policy
from ..policies.grammar import parse_policy
from ..policies.methods.sirllm import token_entropy
from ..settings import RunSettings
from .block import read_block
from .eviction import evict_if_due, make_room
from .fork import fork
from .geometry.positions import Positions
from .geometry.rotation import RotationTables
from .geometry.schedule import Schedule
from .reread import check_answering, in_prompt, source, start_reread
from .storage.groups import SPARE
from .storage.quantised import QuantisedLayer, Scratch, check_storage
from .storage.ragged import RaggedLayer
from .storage.ragged_quantised import RaggedQuantisedLayer
from .storage.rows import BoundedLayer

if TYPE_CHECKING:
    from ..heads import RetainingHeads


@dataclass
class CacheCounters:
    """What the cache did, for the report. Seconds are host time; scoring includes the statistics of attention, compacting
    the merging of what goes."""

    evictions: int = 0
    """Of the layer that had most."""
    evicted_rows: int = 0
    score_s: float = 0.0
    select_s: float = 0.0
    compact_s: float = 0.0
    decoding: str = "dynamic"
    """How tokens were decoded: "graph", or "dynamic" and why."""


class BoundedCache(Cache):
    """A key/value cache of fixed size for ``model.generate`` and for the kit's own prefill.

    Args:
        settings: a ``RunSettings``, or its budget: slots that a key/value head of a full-attention layer keeps after an
            eviction, everything counted; the mean over layers and heads where the policy's allocation tells them apart.
        policy: a name or an expression of the policy grammar, or a ``Policy``; by default what ``heads`` were published
            with, or locret.
        heads: retaining heads, for policies that score by predicted importance; the first forward moves them to the
            model's device and dtype. What they were published with stands in for settings that are not given.
        prompt_length: tokens of the prompt. When given, the last ``local_len`` of them are never evicted before
            decoding, and the eviction before them protects no stabilizers (Locret, algorithm 1). When not, every
            boundary is treated as one in the middle of the prompt.
        **given: fields of ``RunSettings`` by name, where ``settings`` is none.

    Raises:
        ValueError: a setting out of range; names the setting, its value and the bound.
    """

    def __init__(
        self,
        settings: RunSettings | int | float | None = None,
        policy: str | Policy | None = None,
        heads: RetainingHeads | None = None,
        *,
        prompt_length: int | None = None,
        **given: Any,
    ) -> None:
        super().__init__(layers=[])
        if policy is None:
            policy = heads.config.policy if heads is not None else "locret"
        self.policy = parse_policy(policy) if isinstance(policy, str) else policy
        if not isinstance(settings, RunSettings):
            settings = RunSettings.of(given if settings is None else {"budget": settings, **given})
        elif given:
            raise ValueError(f"{', '.join(given)}: given twice, within settings and by name")
        if self.policy.needs_heads and heads is None:
            raise ValueError(f"policy={self.policy.name!r} scores with retaining heads: pass heads=")
        if self.policy.prefill_mask is not None and prompt_length is None:
            raise ValueError(
                f"policy={self.policy.name!r} reads the prompt otherwise than what follows: pass prompt_length="
            )
        check_storage(settings.kv_bits, self.policy)
        self.settings = settings.resolved(heads.config.inference if heads is not None else {}, prompt_length)
        self.schedule = Schedule.of(self.settings, prompt_length)
        check_answering(self.policy, self.schedule)
        self.heads = heads if self.policy.needs_heads else None
        self.positions = self.settings.positions
        self.places = Positions(None)
        self.seed = settings.seed
        self.kv_bits = settings.kv_bits
        self.backend: str | None = settings.backend
        self.scratch = Scratch()
        self.counters = CacheCounters()
        self.spec: BackboneSpec | None = None
        self.wants_unrotated = False
        self.ropes: list[Rope] | None = None
        self.budgets: list[int] = []
        """Slots of a head of each layer; a windowed layer has none and holds its window."""
        # The statistics that are kept; a slot's count follows from its position.
        self.statistics = tuple(sorted(self.policy.statistics - {"count"}))
        self.tables = RotationTables()
        self.model: Any = None
        self.last_hidden: Tensor | None = None
        self.passages: list[int] = []
        """Where the tokens stand in the prompt that are read in its place, the tail's included, see ``policies.answering``;
        empty where the prompt is read once, or not yet for the second time."""
        self.unfinished = False
        """Whether a forward has begun that not every layer has finished."""
        self.stepping: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None = None
        """What attends instead while a token is decoded with fixed shapes (see ``static``): layer, q, k, v."""

    # ---- binding to a model -------------------------------------------------------------------------------------

    def bind(self, model: Any) -> None:
        """Size the layers for ``model`` at the first forward; later calls only check that the model is the same.

        Raises:
            ValueError: the rows are of another model, or an interrupt left them half written.
        """
        self.refuse_interrupted()
        spec = spec_of(text_config(model))
        if self.spec is not None:
            if self.spec != spec:
                raise ValueError("this cache already holds rows of another model")
            return
        config = text_config(model)
        # Where the architecture is known, the kit rotates: frequencies are then chosen once for the whole prompt.
        self.wants_unrotated = has_adapter(config)
        if self.positions is None:
            self.positions = "compact" if self.wants_unrotated else "original"
        self.places = Positions.parse(self.positions, getattr(config, "max_position_embeddings", 0))
        if self.places.span is not None or self.policy.needs_adapter:
            require_adapter(config)
        if self.heads is not None:
            self.heads.check_backbone(spec)
            self.heads.to(model.device, model.dtype)
        if self.policy.merge is not None:
            self.policy.merge.bind(spec, model.device)
        self.backend = choose(self.backend, model.device, spec.head_dim, model.dtype)
        self.budgets = self._layer_budgets(spec.windows)
        recent = self.policy.recent(self.schedule.chunk)
        for window, budget in zip(spec.windows, self.budgets, strict=True):
            if window is not None:  # the rows that the window can still see beside one block, and no more
                self.layers.append(BoundedLayer(window - 1 + self.schedule.chunk, window))
            elif self.policy.keeps_everything:
                self.layers.append(self._layer(self.schedule.prompt_length or 0, spare=0.0))
            else:
                self.layers.append(self._layer(budget + self.schedule.chunk, len(self.statistics), recent))
        for rows in self.bounded:
            rows.backend = self.backend
        if self.wants_unrotated:
            self.ropes = ropes_of(model, self._span(spec))
        self.model = model
        self.spec = spec

    def refuse_interrupted(self) -> None:
        """Raise ValueError where a forward ended in the middle: layers have seen different numbers of tokens then."""
        if self.unfinished:
            seen = sorted({rows.seen for rows in self.bounded})
            raise ValueError(
                f"this cache was interrupted inside a forward, after {seen[0]} to {seen[-1]} tokens: reset() it and read again"
            )

    def _layer(self, capacity: int, statistics: int = 0, recent: int = 0, spare: float = SPARE) -> BoundedLayer:
        """Rows of one layer without a window."""
        if self.kv_bits is not None:
            stored = RaggedQuantisedLayer if self.policy.ragged else QuantisedLayer
            return stored(capacity, statistics, recent, bits=self.kv_bits, scratch=self.scratch, spare=spare)
        make = RaggedLayer if self.policy.ragged else BoundedLayer
        merges = self.policy.merge is not None and self.policy.merge.remembers
        return make(capacity, None, statistics, recent, merges=merges)

    def _layer_budgets(self, windows: tuple[int | None, ...]) -> list[int]:
        s, full = self.schedule, sum(window is None for window in windows)
        shares = iter(self.policy.layer_budgets(s.budget, full, s.chunk, s.stabilizers, s.tail, s.prompt_length))
        return [next(shares) if window is None else 0 for window in windows]

    def _span(self, spec: BackboneSpec) -> int:
        """The largest position of a run plus one."""
        s = self.schedule
        if self.policy.keeps_everything or None not in spec.windows:  # rows of a window keep their place in the text
            return s.prompt_length or 0
        heads = spec.n_kv_heads if self.policy.ragged else 1
        return self.places.largest(max(self.budgets, default=0) * heads + s.chunk, s.prompt_length)

    # ---- the handler ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scaling: float) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of new tokens; stores them and evicts where the schedule says."""
        rows = self.bounded[layer]
        rows.scaling = scaling
        if self.stepping is not None:
            return self.stepping(layer, q_BQTD, k_BHTD, v_BHTD)
        if layer == 0:
            self.tables.clear()
            if self.needs_reread and rows.seen >= (self.schedule.prompt_length or 0):
                raise RuntimeError(
                    f"policy={self.policy.name!r} reads the end of the prompt twice, which locret_kit's own prefill does and "
                    "model.generate does not: use locret_kit.runtime.session.generate"
                )
        self.unfinished = True
        out, start, tokens = [], 0, q_BQTD.shape[2]
        while start < tokens:
            step = min(tokens - start, self._block_length(rows))
            new = slice(start, start + step)
            make_room(self, layer, rows, step)
            out.append(read_block(self, layer, rows, q_BQTD[:, :, new], k_BHTD[:, :, new], v_BHTD[:, :, new], scaling))
            if not self.policy.needs_logits:
                evict_if_due(self, layer, rows)
            rows.finish_block()
            start += step
        self.unfinished = layer + 1 < len(self.layers) or self.policy.needs_logits
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)

    def _block_length(self, rows: BoundedLayer) -> int:
        """Tokens that may be read before the next eviction could fall due."""
        room = self.schedule.chunk if self.policy.keeps_everything else rows.capacity - rows.rows
        later = None if self.policy.needs_logits else self.schedule.after_prompt(rows.seen, room)
        return self.schedule.until_boundary(rows.seen) if later is None else later

    @property
    def needs_reread(self) -> bool:
        """Whether the prompt's tail is yet to be read for the second time."""
        s = self.schedule
        asked = self.policy.reread is not None and any(self.budgets)  # windows alone hold no index to the text
        return asked and not self.passages and (s.prompt_length or 0) > s.budget

    def start_reread(self) -> None:
        """Call it after a piece of the prompt: where more is to be read than was left, ``get_seq_length`` then says so."""
        start_reread(self)

    def source(self, start: int, end: int) -> Sequence[int]:
        """Where in the prompt the tokens stand that are fed as those of positions ``start`` to ``end``."""
        return source(self, start, end)

    def rotates_rows(self, rows: BoundedLayer) -> bool:
        """Whether keys are stored before RoPE and rotated whenever they are read."""
        return self.ropes is not None and self.places.span is not None and rows.window is None

    def entry_scores(self, layer: int, rows: BoundedLayer, position: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores ``[B, H, T]`` of new tokens; the first is at ``position``, which only the device may know."""
        began = time.perf_counter()
        entry = Entry(
            layer=layer,
            position=position,
            q=q,
            k=k,
            v=v,
            head=self.heads[layer] if self.heads is not None else None,
            seed=self.seed,
            rope=self.ropes[layer] if self.ropes is not None else None,
            state=rows.state,
        )
        # A windowed layer's scores are never read, and its score's memory would grow with the text.
        score_BHT = self.policy.score.score_new_tokens(entry) if rows.window is None else None
        if score_BHT is None:
            score_BHT = torch.zeros((), device=k.device).expand(k.shape[:3])
        self.counters.score_s += time.perf_counter() - began
        return score_BHT

    # ---- policies that read the backbone's logits --------------------------------------------------------------------

    @property
    def needs_logits(self) -> bool:
        """Whether ``read`` must be called after every forward, and no forward may cross a boundary."""
        return self.policy.needs_logits

    def blocks(self, tokens: int) -> list[int]:
        """Lengths of the blocks in which the next ``tokens`` tokens go."""
        return list(self.schedule.blocks(self.get_seq_length(), tokens))

    @torch.no_grad()
    def read(self, hidden_BTE: Tensor, ids_BT: Tensor) -> None:
        """Score the block that was just read by the final hidden states of its tokens, then evict where it is due."""
        began = time.perf_counter()
        score_BT, self.last_hidden = token_entropy(self.model, hidden_BTE, ids_BT, self.last_hidden)
        for rows in self.bounded:
            if rows.window is None:
                rows.score_newest(score_BT)
        self.counters.score_s += time.perf_counter() - began
        for layer, rows in enumerate(self.bounded):
            evict_if_due(self, layer, rows)
        self.unfinished = False

    # ---- copies ------------------------------------------------------------------------------------------------------

    def fork(self, prompt_length: int | None = None) -> BoundedCache:
        """An independent copy that goes on with another prompt of the same beginning: a document read once and asked
        several questions. Heads, policy and model are shared, the buffers are copied.

        Going on equals a fresh run of the new prompt: bit for bit where the fork was made at a multiple of ``chunk``.

        Args:
            prompt_length: tokens of the new prompt, those read so far included; None leaves it unknown.

        Raises:
            ValueError: what was read reaches into the new prompt's tail, or a fresh run of the new prompt would have evicted
                otherwise so far.
        """
        return fork(self, prompt_length)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedCache:
        """As ``fork``, for the same prompt: heads, policy and model are shared, all else is copied."""
        memo.update({id(shared): shared for shared in (self.heads, self.policy, self.model)})
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(deepcopy(vars(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a BoundedCache holds its model and is not pickled: fork() and copy.deepcopy() copy its rows")

    def reset(self) -> None:
        """Forget the text: what is read next is another one, as by a new cache, in the same buffers."""
        super().reset()
        self.last_hidden, self.passages, self.counters, self.unfinished = None, [], CacheCounters(), False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.last_hidden is not None:
            self.last_hidden = self.last_hidden.index_select(0, beam_idx.to(self.last_hidden.device))

    def __bool__(self) -> bool:
        """False, since Phi-3's ``prepare_inputs_for_generation`` goes on without a cache that is true where a text outgrows the
        first factors of LongRoPE; here they are chosen once, and stay."""
        return False

    @property
    def bounded(self) -> list[BoundedLayer]:
        """The layers, by their type."""
        return self.layers  # type: ignore[return-value]

    # ---- what the rest of transformers and the report ask ----------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if active_handler() is not self:
            raise RuntimeError(
                "a BoundedCache was given to a model that is not attached: use `with attach(model): ...`"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.bounded[layer_idx].get_seq_length() if self.layers else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.bounded[layer_idx].get_mask_sizes(query_length) if self.layers else (int(query_length), 0)

    def kept_positions(self, layer: int) -> Any:
        """Positions (int32, ascending) of the tokens that layer holds now: ``[B, H, rows]``, or where heads differ a list
        of lists; ``kept_positions(layer)[b][h]`` is a head's either way."""
        return in_prompt(self, self.bounded[layer].kept())

    @property
    def kept_rows(self) -> list[int]:
        """Rows a head holds now (on average where heads differ), a layer each."""
        return [layer.rows for layer in self.bounded]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.nbytes for layer in self.bounded) + self.scratch.nbytes
