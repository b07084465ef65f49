"""Rows of one layer: key, value, position, entry score and running statistics per slot, the same number in every head
(``ragged`` lets heads differ). The methods of ``BoundedLayer`` are the interface of every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from locret_kernels.backend import function
from locret_kernels.ragged_decode import PackedRows

from ...policies.base import rows_of
from ..decoding import VarlenRows

Index = slice | Tensor | tuple[slice | Tensor | int, ...]
"""Index of rows in a layer's buffers."""
PER_ROW = ("keys", "values", "positions", "scores")


@dataclass(frozen=True)
class EqualLengthHeads:
    """View of the heads with equal row counts: input of one attention call."""

    batch: slice
    heads: slice
    keys: Tensor
    """``[b, h, S, D]``"""
    values: Tensor
    stats: Tensor
    """``[statistics, b, h, S]``"""
    positions: Tensor
    """``[b, h, S]``"""


class BoundedLayer(CacheLayerMixin):
    """Rows of one layer, preallocated, ordered by age. ``update`` hands the new keys and values through: the rows are
    written by ``BoundedCache.attend``, which the attention call reaches right after."""

    is_sliding = False
    ragged = False
    backend = "reference"
    """Of ``locret_kernels``, which moves the rows."""
    per_row: tuple[str, ...] = PER_ROW
    """Buffers ``[B, H, capacity, ...]`` that move with the rows."""
    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]
    positions: Tensor
    scores: Tensor
    stats: Tensor
    """``[statistics, B, H, capacity]`` float32."""
    absorbed: Tensor
    """``[B, H, capacity]`` float32, where evicted slots are merged: logarithm of the weight that a slot has taken over."""
    queries: Tensor
    """The newest ``recent`` queries ``[B, Q, recent, D]`` as they came, the newest last."""

    def __init__(
        self, capacity: int, window: int | None = None, statistics: int = 0, recent: int = 0, *, merges: bool = False
    ) -> None:
        super().__init__()
        self.capacity, self.window = capacity, window
        self.statistics, self.recent, self.merges = statistics, recent, merges
        if merges:
            self.per_row = (*self.per_row, "absorbed")
        self.scaling = 1.0
        self.state: dict[str, Tensor] = {}
        self.rows = 0
        self.seen = 0
        self.since_eviction = 0
        self.evictions = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        # Allocated once, for budget + chunk rows; nothing is ever concatenated.
        with torch.inference_mode(False):  # so that buffers of a prefill in inference mode can be written outside of it
            self.keys = key_states.new_empty(*self._shape(B, H), D)
            self.values = value_states.new_empty(*self._shape(B, H), value_states.shape[-1])
            self.positions = torch.empty(self._shape(B, H), dtype=torch.int32, device=self.device)
            self.scores = torch.empty(self._shape(B, H), dtype=torch.float32, device=self.device)
            self.stats = torch.empty(self.statistics, *self._shape(B, H), dtype=torch.float32, device=self.device)
            if self.merges:
                self.absorbed = torch.empty_like(self.scores)
        self.is_initialized = True

    def _shape(self, B: int, H: int) -> tuple[int, ...]:
        """Shape of a buffer with one number a row."""
        return B, H, self.capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.shape[0] != self.batch:
            raise ValueError(f"batch={key_states.shape[0]} must be {self.batch}, for which this cache has its buffers")
        return key_states, value_states

    @property
    def batch(self) -> int:
        """Batch size."""
        return self.positions.shape[0]

    # ---- new rows ------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, score_BHT: Tensor) -> None:
        """Write new rows after the newest one."""
        T = k.shape[2]
        self.put(slice(self.rows, self.rows + T), k, v, score_BHT, self._new_positions(T))
        self.count(T)

    def put(self, new: slice | Tensor, k: Tensor, v: Tensor, score_BHT: Tensor, position_T: Tensor) -> None:
        """Write rows at ``new``, which may be a tensor that only the device knows, without counting them."""
        self._write(new, k, v)
        self.scores[:, :, new] = score_BHT
        self.positions[:, :, new] = position_T
        self._begin(new)

    def _write(self, new: slice | Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[:, :, new], self.values[:, :, new] = k, v

    def _begin(self, new: slice | Tensor) -> None:
        """Zero the statistics of new rows. Writing a Python scalar through a device index copies it host-to-device and
        synchronises, so device scalars are written."""
        self.stats[..., new] = self.stats.new_zeros(())
        if self.merges:
            self.absorbed[..., new] = self.absorbed.new_full((), float("-inf"))

    def finish_block(self) -> None:
        """Bring new rows into the form in which they are kept, after their block's attention and eviction."""

    def _new_positions(self, T: int) -> Tensor:
        return torch.arange(self.seen, self.seen + T, device=self.device, dtype=torch.int32)

    def count(self, T: int) -> None:
        """``T`` rows more."""
        self.rows += T
        self.seen += T
        self.since_eviction += T

    def remember(self, q_BQTD: Tensor) -> None:
        """Keep the newest ``recent`` queries at hand."""
        if not self.recent:
            return
        if not hasattr(self, "queries"):
            B, Q, _, D = q_BQTD.shape
            with torch.inference_mode(False):
                self.queries = q_BQTD.new_zeros(B, Q, self.recent, D)
        T = q_BQTD.shape[2]
        # The buffer [B, Q, recent, D] moves up by T; clone, since source and target overlap.
        if self.recent > T:
            self.queries[:, :, :-T] = self.queries[:, :, T:].clone()
        self.queries[:, :, -T:] = q_BQTD[:, :, -self.recent :]

    def score_newest(self, score_BT: Tensor) -> None:
        """Set the entry scores of the newest rows, the same for every head."""
        T = score_BT.shape[1]
        self.scores[:, :, self.rows - T : self.rows] = score_BT[:, None]

    # ---- what attention and policies read ------------------------------------------------------------------------

    def parts(self) -> Iterator[EqualLengthHeads]:
        """The rows as they lie, heads of equal length together."""
        B, H = self.positions.shape[:2]
        yield EqualLengthHeads(
            slice(0, B),
            slice(0, H),
            self.slots("keys"),
            self.slots("values"),
            self.slots("stats"),
            self.slots("positions"),
        )

    @property
    def reads_flat(self) -> bool:
        """Whether one token's attention reads ``flat`` rather than ``parts``."""
        return False

    def flat(self) -> VarlenRows:
        """The rows as they lie, of all heads together."""
        # All heads end to end [B * H * capacity]: head (b, h) begins at its multiple of the capacity.
        B, H = self.positions.shape[:2]
        starts = self.capacity * torch.arange(B * H, device=self.device).view(B, H)
        lengths = torch.full_like(starts, self.rows)
        return VarlenRows(
            self._flat_rows(), self.positions.flatten(), self.stats.flatten(1), starts, lengths, self.rows
        )

    def _flat_rows(self) -> tuple[Tensor, Tensor] | PackedRows:
        return self.keys.flatten(0, 2), self.values.flatten(0, 2)

    def head(self, name: str, b: int, h: int) -> Tensor:
        """One head's rows ``[rows, ...]`` of a buffer, in place."""
        return getattr(self, name)[b, h, : self.rows]

    def slots(self, name: str) -> Tensor:
        """A buffer's rows ``[B, H, S, ...]`` (statistics: ``[statistics, B, H, S]``), aligned to the right."""
        buffer = getattr(self, name)
        return buffer[..., : self.rows] if name == "stats" else buffer[:, :, : self.rows]

    def valid(self) -> Tensor:
        """Boolean ``[B, H, S]``: which slots are no padding."""
        return torch.ones(*self.positions.shape[:2], self.rows, dtype=torch.bool, device=self.device)

    def per_head_tables(self, tables: Callable[[int], tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        """Two tables ``[1, 1, size, R]`` that ``tables(rows)`` gives for a head of so many rows; here all heads are alike."""
        cos, sin = tables(self.rows)
        return cos[None, None], sin[None, None]

    @property
    def head_lengths(self) -> list[int] | None:
        """Rows of every head, where heads differ."""
        return None

    def kept(self) -> Tensor | list[list[Tensor]]:
        """Positions ``[B, H, rows]`` held now."""
        return self.positions[:, :, : self.rows].clone()

    def set_entry_scores(self, score_BHS: Tensor) -> None:
        """Take the entry scores of ``slots("scores")`` back; here those are the buffer itself."""

    # ---- eviction ------------------------------------------------------------------------------------------------

    def keep(self, stay_BHS: Tensor, mean: int) -> None:
        """Keep the slots that stay, ``mean`` of them a head, and move them to the front; the rest is free."""
        # In place: row i moves to a row that is not above it, so order by age is kept.
        function("compact_rows", self.backend)(self._moving(), rows_of(stay_BHS, mean))
        self.rows = mean
        self.since_eviction = 0

    def _moving(self) -> list[Tensor]:
        """Every buffer ``[B, H, capacity, ...]`` whose rows an eviction moves."""
        return [*(getattr(self, name) for name in self.per_row), *self.stats]

    def drop_oldest(self, keep: int) -> None:
        """Keep the newest ``keep`` rows (layers with a window)."""
        if self.rows > keep:
            # clone, since source and target overlap where more than half stays
            old, self.rows = self.rows, keep
            for rows in (self.keys, self.values, self.positions, self.scores):
                rows[:, :, :keep] = rows[:, :, old - keep : old].clone()

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows at least, twice as many as before or more (full attention of unknown length)."""
        # Doubling makes the copies of a whole text linear in its length.
        self.capacity = max(rows, 2 * self.capacity)
        for name in self.per_row:
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = old.new_empty(*old.shape[:2], self.capacity, *old.shape[3:])
            new[:, :, : self.rows] = old[:, :, : self.rows]
            setattr(self, name, new)
        with torch.inference_mode(False):
            self.stats = self.stats.new_empty(*self.stats.shape[:3], self.capacity)

    # ---- what the rest of transformers asks ----------------------------------------------------------------------

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
        self.rows = self.seen = self.since_eviction = self.evictions = 0
        self.state.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            beam_idx = beam_idx.to(self.device)
            for name in self.per_row:
                setattr(self, name, getattr(self, name).index_select(0, beam_idx))
            self.stats = self.stats.index_select(1, beam_idx)
            self._reorder_rest(beam_idx)

    def _reorder_rest(self, beam_idx: Tensor) -> None:
        self.state = {name: value.index_select(0, beam_idx) for name, value in self.state.items()}
        if hasattr(self, "queries"):
            self.queries = self.queries.index_select(0, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a bounded cache cannot be cropped, as assisted generation and prompt lookup do: evicted rows do not come back"
        )

    def copy_from(self, other: BoundedLayer) -> None:
        """Become a copy of another layer of the same shape; nothing is shared."""
        for name, value in vars(other).items():
            if isinstance(value, Tensor):
                with torch.inference_mode(False):
                    value = torch.empty_like(value).copy_(value)
            setattr(self, name, value)
        self.state = {name: value.clone() for name, value in other.state.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the preallocated buffers and of what the score remembers."""
        # Every tensor that the layer holds is a buffer, so none can be forgotten here.
        held = (*vars(self).values(), *self.state.values())
        return sum(int(value.nbytes) for value in held if isinstance(value, Tensor))
