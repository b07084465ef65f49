"""A transformers ``Cache`` that never holds more than ``budget + chunk`` rows of a key/value head.

The model may be fed in pieces of any size: evictions happen at boundaries that the prompt and ``chunk`` fix (see
``schedule``), so ``model.generate`` with any ``prefill_chunk_size`` and the kit's own prefill agree exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..backbones.families import BackboneSpec, has_adapter, require_adapter, ropes_of, spec_of, text_config
from ..backbones.intercept import active_handler
from ..backbones.rope import Rope, rotate
from ..policies.base import Context, Entry, Policy
from ..policies.registry import parse_policy
from .attention import attend_rows
from .schedule import Schedule

if TYPE_CHECKING:
    from ..heads import RetainingHeads

POSITIONS = ("compact", "original")


class BoundedLayer(CacheLayerMixin):
    """Rows of one layer, preallocated, ordered by age. ``update`` hands the new keys and values through: the rows are
    written by ``BoundedCache.attend``, which the attention call reaches right after."""

    is_sliding = False
    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]
    positions: Tensor
    scores: Tensor

    def __init__(self, capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.capacity, self.window = capacity, window
        self.rows = 0
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        with torch.inference_mode(False):  # so that buffers of a prefill in inference mode can be written outside of it
            self.keys = key_states.new_empty(B, H, self.capacity, D)
            self.values = value_states.new_empty(B, H, self.capacity, value_states.shape[-1])
            self.positions = torch.empty(B, H, self.capacity, dtype=torch.int32, device=self.device)
            self.scores = torch.empty(B, H, self.capacity, dtype=torch.float32, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def append(self, k: Tensor, v: Tensor, score_BHT: Tensor) -> None:
        """Write new rows behind the newest one."""
        new = slice(self.rows, self.rows + k.shape[2])
        self.keys[:, :, new], self.values[:, :, new], self.scores[:, :, new] = k, v, score_BHT
        self.positions[:, :, new] = torch.arange(
            self.seen, self.seen + k.shape[2], device=self.device, dtype=torch.int32
        )
        self.rows += k.shape[2]
        self.seen += k.shape[2]

    def keep(self, index_BHK: Tensor) -> None:
        """Keep the rows of ``index`` (ascending, int64) and move them to the front; the rest is free."""
        K = index_BHK.shape[2]
        for rows in (self.keys, self.values):
            index = index_BHK[..., None].expand(-1, -1, -1, rows.shape[-1])
            rows[:, :, :K] = rows[:, :, : self.rows].gather(2, index)
        for stat in (self.positions, self.scores):
            stat[:, :, :K] = stat[:, :, : self.rows].gather(2, index_BHK)
        self.rows = K

    def drop_oldest(self, keep: int) -> None:
        """Keep the newest ``keep`` rows (layers with a window)."""
        if self.rows > keep:
            old, self.rows = self.rows, keep
            for rows in (self.keys, self.values, self.positions, self.scores):
                rows[:, :, :keep] = rows[:, :, old - keep : old].clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows + int(query_length), self.seen - self.rows

    def get_seq_length(self) -> int:
        """Tokens seen (the logical length), not rows kept."""
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.rows = self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            for name in ("keys", "values", "positions", "scores"):
                setattr(self, name, getattr(self, name).index_select(0, beam_idx.to(self.device)))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a bounded cache cannot be cropped: evicted rows do not come back")

    @property
    def nbytes(self) -> int:
        """Bytes of the preallocated buffers."""
        if not self.is_initialized:
            return 0
        return sum(int(t.nbytes) for t in (self.keys, self.values, self.positions, self.scores))


@dataclass
class CacheCounters:
    """What the cache did, for the report."""

    evictions: int = 0
    evicted_rows: int = 0
    score_s: float = 0.0
    select_s: float = 0.0
    compact_s: float = 0.0


class BoundedCache(Cache):
    """A key/value cache of fixed size for ``model.generate`` and for the kit's own prefill.

    Args:
        budget: slots that each key/value head of a full-attention layer keeps after an eviction, everything counted.
        policy: a name or an expression of the policy grammar, or a ``Policy``.
        heads: retaining heads, for policies that score by predicted importance.
        chunk: tokens between evictions; the buffers hold ``budget + chunk`` rows.
        prompt_length: tokens of the prompt. When given, the last ``local_len`` of them are never evicted before
            decoding, and the eviction before them protects no stabilizers (Locret, algorithm 1). When not, every
            boundary is treated as one in the middle of the prompt.
        stabilizers: newest slots that a prefill eviction may not take.
        positions: "compact" rotates keys by their row, so no position exceeds ``budget + chunk``; "original" keeps the
            true positions. Default: compact where the architecture has an adapter.
        seed: for policies that draw.

    Raises:
        ValueError: a setting out of range; names the setting, its value and the bound.
    """

    def __init__(
        self,
        budget: int,
        policy: str | Policy = "locret",
        heads: RetainingHeads | None = None,
        *,
        chunk: int = 512,
        prompt_length: int | None = None,
        stabilizers: int | None = None,
        local_len: int | None = None,
        positions: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self.policy = parse_policy(policy) if isinstance(policy, str) else policy
        if positions is not None and positions not in POSITIONS:
            raise ValueError(f"positions={positions!r} must be one of: {', '.join(POSITIONS)}")
        if self.policy.needs_heads and heads is None:
            raise ValueError(f"policy={self.policy.name!r} scores with retaining heads: pass heads=")
        self.schedule = Schedule.scaled(budget, chunk, prompt_length, stabilizers, local_len)
        self.heads = heads if self.policy.needs_heads else None
        self.positions = positions
        self.seed = seed
        self.counters = CacheCounters()
        self.spec: BackboneSpec | None = None
        self.wants_unrotated = False
        self.ropes: list[Rope] | None = None
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    # ---- binding to a model -------------------------------------------------------------------------------------

    def bind(self, model: nn.Module) -> None:
        """Size the layers for ``model`` at the first forward; later calls only check that the model is the same."""
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
        if self.positions == "compact" or self.heads is not None:
            require_adapter(config)
        if self.heads is not None:
            self.heads.check_backbone(spec)
        capacity = self.schedule.capacity
        if self.policy.keeps_everything:
            capacity = self.schedule.prompt_length or 0
        for window in spec.windows:
            # A windowed layer holds the rows its window can still see beside one block, and no more.
            rows = capacity if window is None else window - 1 + self.schedule.chunk
            self.layers.append(BoundedLayer(rows, window))
        if self.wants_unrotated:
            span = self.schedule.prompt_length or capacity
            if self.positions == "compact" and not self.policy.keeps_everything:
                span = min(span, capacity)
            self.ropes = ropes_of(model, span)
        self.spec = spec

    # ---- the handler ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scaling: float) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of new tokens; stores them and evicts where the schedule says."""
        rows = self.bounded[layer]
        score_BHT = self._scores(layer, rows.seen, q_BQTD, k_BHTD, v_BHTD)
        total = q_BQTD.shape[2]
        if layer == 0:
            self._tables.clear()
        out, start = [], 0
        while start < total:
            step = min(total - start, self.schedule.until_boundary(rows.seen))
            new = slice(start, start + step)
            q, k, v = q_BQTD[:, :, new], k_BHTD[:, :, new], v_BHTD[:, :, new]
            self._make_room(layer, rows, step)
            out.append(self._block(layer, rows, q, k, v, score_BHT[:, :, new], scaling))
            keep = self.schedule.keep_at(rows.seen, rows.rows)
            if keep is not None and rows.window is None:
                self._evict(layer, rows, keep, decoding=False)
            start += step
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)

    def _block(
        self, layer: int, rows: BoundedLayer, q: Tensor, k: Tensor, v: Tensor, score_BHT: Tensor, scaling: float
    ) -> Tensor:
        """Attend over the rows and one block of new tokens, which become rows."""
        T = q.shape[2]
        if self.ropes is None:  # the backbone rotated already
            rows.append(k, v, score_BHT)
            return attend_rows(q, rows.keys[:, :, : rows.rows], rows.values[:, :, : rows.rows], scaling, rows.window)
        rope = self.ropes[layer]
        if self.positions == "original" or rows.window is not None:
            cos, sin = self._table(rope, rows.seen, T, q)
            rows.append(rotate(k, cos, sin), v, score_BHT)
            keys, q = rows.keys[:, :, : rows.rows], rotate(q, cos, sin)
        else:
            rows.append(k, v, score_BHT)
            cos, sin = self._table(rope, 0, rows.rows, q)
            keys = rotate(rows.keys[:, :, : rows.rows], cos, sin)
            q = rotate(q, cos[-T:], sin[-T:])
        return attend_rows(q, keys, rows.values[:, :, : rows.rows], scaling, rows.window)

    def _table(self, rope: Rope, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (id(rope), start, length)
        if key not in self._tables:
            pos_T = torch.arange(start, start + length, device=like.device)
            self._tables[key] = rope.tables(pos_T, like.dtype)
        return self._tables[key]

    def _scores(self, layer: int, position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        began = time.perf_counter()
        head = self.heads[layer] if self.heads is not None else None
        entry = Entry(layer=layer, position=position, q=q, k=k, v=v, head=head, seed=self.seed)
        score_BHT = self.policy.score.enter(entry)
        self.counters.score_s += time.perf_counter() - began
        return score_BHT

    def _make_room(self, layer: int, rows: BoundedLayer, step: int) -> None:
        """Before a block is appended: windowed layers forget what no query can see; decoding evicts when full."""
        if rows.rows + step > rows.capacity:
            if rows.window is not None:
                rows.drop_oldest(rows.window - 1)
            elif self.policy.keeps_everything:
                self._grow(rows, step)
            else:
                self._evict(layer, rows, self.schedule.budget, decoding=True)

    def _grow(self, rows: BoundedLayer, step: int) -> None:
        """Full attention without a known prompt length: double the buffers."""
        rows.capacity = max(rows.rows + step, 2 * rows.capacity)
        for name in ("keys", "values", "positions", "scores"):
            old = getattr(rows, name)
            with torch.inference_mode(False):
                new = old.new_empty(*old.shape[:2], rows.capacity, *old.shape[3:])
            new[:, :, : rows.rows] = old[:, :, : rows.rows]
            setattr(rows, name, new)

    def _evict(self, layer: int, rows: BoundedLayer, keep: int, *, decoding: bool) -> None:
        if self.policy.keeps_everything or rows.rows <= keep:
            return
        t0 = time.perf_counter()
        stabilizers = 0 if self.schedule.is_last(rows.seen) and not decoding else self.schedule.stabilizers
        context = Context(
            layer=layer,
            keep=keep,
            stabilizers=min(stabilizers, keep),
            scores=rows.scores[:, :, : rows.rows],
            positions=rows.positions[:, :, : rows.rows],
        )
        index_BHK = self.policy.choose(context)
        t1 = time.perf_counter()
        if layer == 0:
            self.counters.evictions += 1
        self.counters.evicted_rows += (rows.rows - keep) * index_BHK.shape[0] * index_BHK.shape[1]
        rows.keep(index_BHK)
        self.counters.select_s += t1 - t0
        self.counters.compact_s += time.perf_counter() - t1

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

    def kept_positions(self, layer: int) -> Tensor:
        """Positions ``[B, H, rows]`` (int32, ascending) of the tokens that layer holds now."""
        rows = self.bounded[layer]
        return rows.positions[:, :, : rows.rows].clone()

    @property
    def kept_rows(self) -> list[int]:
        """Rows held now, a layer each."""
        return [layer.rows for layer in self.bounded]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.nbytes for layer in self.bounded)
