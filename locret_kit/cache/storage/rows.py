"""Rows of one layer: key, value, position, entry score and running statistics per slot, the same number in every head
(``ragged`` lets heads differ). The methods of ``BoundedLayer`` are the interface of every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from locret_kernels.backend import function
from locret_kernels.ragged_decode import Float8Rows, PackedRows

from ..decoding import VarlenRows
from .blocks import BlockStore

Index = slice | Tensor | tuple[slice | Tensor | int, ...]
"""Index of rows in a layer's buffers."""
Column = tuple[torch.dtype, tuple[int, ...]]
"""Dtype of a buffer that has a row per slot, and the shape of one row."""
COUNTS = ("rows", "seen", "since_eviction", "evictions")
"""Counts of a layer that a step changes."""
STATE = "state."
"""Prefix of the names under which a score's state is exported."""
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""


@dataclass(frozen=True)
class EqualLengthHeads:
    """View of the heads with equal row counts: input of one attention call."""

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
    grows = False
    """Whether rows that no window ends are all kept, in buffers that grow."""
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
    store: BlockStore | None = None
    """What was evicted, where it may come back."""

    def __init__(
        self,
        capacity: int,
        window: int | None = None,
        statistics: int = 0,
        recent: int = 0,
        *,
        merges: bool = False,
    ) -> None:
        super().__init__()
        self.capacity, self.window = capacity, window
        self.statistics, self.recent, self.merges = statistics, recent, merges
        self.scaling = 1.0
        self.state: dict[str, Tensor] = {}
        self.rows = 0
        self.seen = 0
        self.since_eviction = 0
        self.evictions = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.measure(key_states, value_states)
        # Allocated once, for budget + chunk rows; nothing is ever concatenated.
        shape = self._shape(self.capacity)
        with torch.inference_mode(False):  # so that buffers of a prefill in inference mode can be written outside of it
            for name, (dtype, row) in self.columns().items():
                setattr(self, name, torch.empty(*shape, *row, dtype=dtype, device=self.device))
            self.stats = torch.empty(self.statistics, *shape, dtype=torch.float32, device=self.device)
        self.is_initialized = True

    def measure(self, k_BHTD: Tensor, v_BHTD: Tensor) -> None:
        """Take batch, heads, channels, dtype and device from keys and values. Allocates nothing."""
        self.B, self.H, _, self.key_size = k_BHTD.shape
        self.value_size = v_BHTD.shape[-1]
        self.dtype, self.device = k_BHTD.dtype, k_BHTD.device

    def columns(self) -> dict[str, Column]:
        """Buffers with a row per slot, which move with the rows: ``[B, H, capacity, ...]``."""
        absorbed: dict[str, Column] = {"absorbed": (torch.float32, ())} if self.merges else {}
        return {
            "keys": (self.dtype, (self.key_size,)),
            "values": (self.dtype, (self.value_size,)),
            "positions": (torch.int32, ()),
            "scores": (torch.float32, ()),
            **absorbed,
        }

    def _shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a buffer with one number per row, for so many rows per head."""
        return self.B, self.H, rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

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
        if self.statistics:
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

    takes_back = True
    """Whether rows are held as they came, so that the newest ones can be forgotten."""

    def can_take_back(self, tokens: int) -> bool:
        """Whether the newest tokens can be forgotten as though they had never come: they have changed nothing but their own
        rows, and an older one has come since the last eviction."""
        own = self.takes_back and not (self.statistics or self.recent or self.state)
        own = own and not (self.merges or self.store is not None)
        return own and self.rows > tokens < self.since_eviction and (self.window is None or self.rows == self.seen)

    def take_back(self, tokens: int) -> None:
        """Forget the newest tokens; ``can_take_back`` has said that it can be."""
        self.rows -= tokens
        self.seen -= tokens
        self.since_eviction -= tokens

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
        yield EqualLengthHeads(
            slice(0, self.H),
            self.slots("keys"),
            self.slots("values"),
            self.slots("stats"),
            self.slots("positions"),
        )

    @property
    def reads_flat(self) -> bool:
        """Whether one token's attention reads ``flat`` rather than ``parts``: wherever there are kernels for it.
        PyTorch's attention may plan anew for every length, and takes keys that are rotated already."""
        return self.backend == "triton"

    def flat(self) -> VarlenRows:
        """The rows as they lie, of all heads together."""
        # All heads end to end [B * H * capacity]: head (b, h) begins at its multiple of the capacity.
        B, H = self.positions.shape[:2]
        starts = self.capacity * torch.arange(B * H, device=self.device).view(B, H)
        lengths = torch.full_like(starts, self.rows)
        return VarlenRows(
            self._flat_rows(), self.positions.flatten(), self.stats.flatten(1), starts, lengths, self.rows
        )

    def _flat_rows(self) -> tuple[Tensor, Tensor] | Float8Rows | PackedRows:
        return self.keys.flatten(0, 2), self.values.flatten(0, 2)

    def head(self, name: str, h: int) -> Tensor:
        """One head's rows ``[rows, ...]`` of a buffer, in place."""
        return getattr(self, name)[0, h, : self.rows]

    def slots(self, name: str) -> Tensor:
        """A buffer's rows ``[B, H, S, ...]`` (statistics: ``[statistics, B, H, S]``), aligned to the right."""
        buffer = getattr(self, name)
        return buffer[..., : self.rows] if name == "stats" else self._numbers(name, buffer[:, :, : self.rows])

    def _numbers(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a buffer ``[B, H, S, ...]`` as policies and attention read them."""
        return rows

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
        index_BHK = function("kept_rows", self.backend)(stay_BHS, mean)
        function("compact_rows", self.backend)(self._moving(), index_BHK)
        self.rows = mean
        self.since_eviction = 0

    def _moving(self) -> list[Tensor]:
        """Every buffer ``[B, H, capacity, ...]`` whose rows an eviction moves."""
        return [*(getattr(self, name) for name in self.columns()), *self.stats]

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
        for name in self.columns():
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
        if self.store is not None:
            self.store.clear()

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a bounded cache cannot be cropped, as assisted generation and prompt lookup do: evicted rows do not come back"
        )

    # ---- taken out and put back ------------------------------------------------------------------------------------

    def export(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Everything that the layer needs to go on: counts, and tensors in logical order, wherever the rows lie. Nothing of
        the free room is among them. Tensors may share memory with the buffers; there are none before the first token."""
        counts = {name: getattr(self, name) for name in (*COUNTS, "scaling")}
        if not self.is_initialized:
            return counts, {}
        # Every tensor of the score's state and every buffer, or the layer would go on otherwise.
        rows = self._all_rows()
        tensors = {name: getattr(self, name)[rows] for name in self.columns()}
        if self.statistics:
            tensors["stats"] = torch.stack([stat[rows] for stat in self.stats])
        if hasattr(self, "queries"):
            tensors["queries"] = self.queries
        return counts, tensors | {STATE + name: value for name, value in self.state.items()}

    def layout(self, counts: Mapping[str, float], lengths: Sequence[int], query_heads: int) -> Layout:
        """Dtype and shape of every tensor that ``export`` gives with such counts, but for the score's state. Needs
        ``measure``.

        Args:
            lengths: rows of every head, where heads differ.
        """
        shape = self._shape(int(counts["rows"]))
        found = {name: (dtype, (*shape, *row)) for name, (dtype, row) in self.columns().items()}
        if self.statistics:
            found["stats"] = torch.float32, (self.statistics, *shape)
        if self.recent and counts["seen"]:
            found["queries"] = self.dtype, (self.B, query_heads, self.recent, self.key_size)
        return found

    def restore(
        self, counts: Mapping[str, float], tensors: Mapping[str, Tensor], k_BH0D: Tensor, v_BH0D: Tensor
    ) -> None:
        """Become what ``export`` took out of a layer of the same kind; nothing is shared. The room may be another one.

        Args:
            k_BH0D: empty keys, and so are the values: they tell batch, heads, channels, dtype and device.
        """
        for name, value in counts.items():
            setattr(self, name, value)
        if not tensors:
            return
        # Under full attention a text may be longer than the room that was planned.
        self.capacity = max(self.capacity, self.rows)
        self.lazy_initialization(k_BH0D, v_BH0D)
        self._fill(tensors)

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Write exported tensors into the buffers."""
        rows = self._all_rows()
        for name in self.columns():
            getattr(self, name)[rows] = tensors[name].to(self.device)
        for number in range(self.statistics):
            self.stats[number][rows] = tensors["stats"][number].to(self.device)
        with torch.inference_mode(False):
            own = {name: x.to(self.device, copy=True) for name, x in tensors.items() if name.startswith(STATE)}
            self.state = {name.removeprefix(STATE): x for name, x in own.items()}
            if "queries" in tensors:
                self.queries = tensors["queries"].to(self.device, copy=True)

    def _all_rows(self) -> Index:
        """Index of all rows, in logical order."""
        return slice(None), slice(None), slice(0, self.rows)

    def copy_from(self, other: BoundedLayer) -> None:
        """Become a copy of another layer of the same kind; nothing that one of both writes is shared. The room may be another
        one."""
        if other.is_initialized:
            empty = torch.empty(other.B, other.H, 0, other.key_size, dtype=other.dtype, device=other.device)
            self.restore(*other.export(), empty, empty.new_empty(other.B, other.H, 0, other.value_size))
        if self.store is not None and other.store is not None:
            self.store.share(other.store)

    @property
    def nbytes(self) -> int:
        """Bytes of the preallocated buffers and of what the score remembers."""
        # Every tensor that the layer holds is a buffer, so none can be forgotten here.
        held = (*vars(self).values(), *self.state.values())
        stored = self.store.device_bytes if self.store is not None else 0
        return stored + sum(int(value.nbytes) for value in held if isinstance(value, Tensor))
