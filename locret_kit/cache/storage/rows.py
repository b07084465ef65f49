"""Rows of one layer: key, value, position, entry score and running statistics per slot. A layout says where the rows of each
head lie, a codec how keys and values are stored; both are handed in.

A layer holds one text, so its buffers have no batch axis. New tokens come with one of size 1, and what attention and policies
read (``parts``, ``varlen``, ``slots``) has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from locret_kernels.backend import DEFINITIONS, function
from locret_kernels.ragged_decode import Spans
from locret_kernels.rows import HeadProduct, RowBuffers, Score

from ...backbones.handlers import Softmax
from ..attend import VarlenRows
from .blocks import BlockStore
from .codec import Codec, Column, Plain
from .layouts import ALL, Layout, Shapes
from .quantised import RowBits

CROPPING = (
    "a bounded cache cannot be cropped, as assisted generation and prompt lookup do: evicted rows do not come back"
)
COUNTS = ("rows", "seen", "since_eviction", "evictions")
"""Counts of a layer that a step changes."""


@dataclass(frozen=True)
class EqualLengthHeads:
    """View of the heads with equal row counts: input of one attention call."""

    heads: slice
    keys: Tensor
    """``[1, h, S, D]``"""
    values: Tensor
    stats: Tensor
    """``[statistics, 1, h, S]``"""
    positions: Tensor
    """``[1, h, S]``"""


class Page(NamedTuple):
    """Place of rows that are a page of a pool."""

    pool: object
    first: int
    """Number of the page's first row in the pool."""


class BoundedLayer(CacheLayerMixin):
    """Rows of one layer, preallocated, ordered by age. ``update`` hands the new keys and values through: the rows are
    written by ``BoundedCache.attend``, which the attention call reaches right after.

    Buffers have a row per slot, laid out by ``layout``: positions, scores, statistics, and those of ``codec``.

    Args:
        window: positions that a token sees; None is all. chunked: they are those since the last multiple of ``window``.
        statistics: kept of every slot. recent: newest queries at hand.
        merges: whether evicted slots are merged into others.
    """

    is_sliding = False
    number = 0
    """Place among the layers that have rows."""
    backend, launches = DEFINITIONS, False
    """Backend of ``locret_kernels`` that moves the rows, and whether its operations are launches (``cache.backend``)."""
    grows = False
    """Whether rows that no window ends are all kept, in buffers that grow."""
    positions: Tensor
    scores: Tensor
    stats: Tensor
    """``[statistics, ...]`` float32."""
    absorbed: Tensor
    """Float32, where evicted slots are merged: logarithm of the weight that a slot has taken over."""
    queries: Tensor
    """The newest ``recent`` queries ``[Q, recent, D]`` as they came, the newest last."""
    store: BlockStore | None = None
    """Evicted slots that may come back."""
    external: Mapping[str, Tensor] | None = None
    """Buffers of another owner, one of the same size for every name of ``shapes``; such a layer does not grow."""
    page: Page | None = None
    """The page that holds the rows, in a pool."""

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        window: int | None = None,
        statistics: int = 0,
        recent: int = 0,
        *,
        merges: bool = False,
        chunked: bool = False,
    ) -> None:
        super().__init__()
        self.layout, self.codec, self.window = layout, codec, window
        self.statistics, self.recent, self.merges = statistics, recent, merges
        self.chunked = chunked
        self.softmax = Softmax(1.0)
        self.state: dict[str, Tensor] = {}
        self.seen = self.since_eviction = self.evictions = 0

    @property
    def scaling(self) -> float:
        """Factor on the products of queries and keys."""
        return self.softmax.scaling

    @scaling.setter
    def scaling(self, scaling: float) -> None:
        self.softmax = self.softmax._replace(scaling=scaling)

    @property
    def rows(self) -> int:
        """Rows of a head, on average where heads differ."""
        return self.layout.rows

    @rows.setter
    def rows(self, rows: int) -> None:
        self.layout.rows = rows

    def counts(self) -> dict[str, float]:
        """Counts in an export of the layer, besides its tensors."""
        own = {name: getattr(self, name) for name in (*COUNTS, "scaling")}
        return own | {name: getattr(self.codec, name) for name in self.codec.COUNTS}

    @property
    def capacity(self) -> int:
        """Rows per head that fit the buffers."""
        return self.layout.capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers once, for budget and chunk, from keys and values ``[1, H, T, D]``. Nothing is
        concatenated later."""
        self.measure(key_states, value_states)
        # Allocated once, for budget + chunk rows; nothing is ever concatenated.
        with torch.inference_mode(False):  # so that buffers of a prefill in inference mode can be written outside of it
            for name, (dtype, shape) in self.shapes().items():
                given = None if self.external is None else self.external[name]
                made = torch.empty(shape, dtype=dtype, device=self.device) if given is None else given
                setattr(self.holder(name), name, made)
            self.layout.begin()
        self.is_initialized = True

    def measure(self, k_BHTD: Tensor, v_BHTD: Tensor) -> None:
        """Take heads, channels, dtype and device from keys and values. Allocates nothing."""
        _, H, _, key_size = k_BHTD.shape
        self.dtype, self.device = k_BHTD.dtype, k_BHTD.device
        self.layout.measure(H, self.device)
        self.codec.measure(self.layout, key_size, v_BHTD.shape[-1], self.dtype)

    def shapes(self) -> Shapes:
        """Dtype and shape of every buffer that is made for the first token. Needs ``measure``."""
        shape = self.layout.shape(self.capacity)
        columns = {name: (dtype, (*shape, *row)) for name, (dtype, row) in self.columns().items()}
        return columns | {"stats": (torch.float32, (self.statistics, *shape))} | self.codec.tables()

    def planned_bytes(self, query_heads: int) -> int:
        """Bytes of all that the layer holds once tokens have come, but for what its score remembers and its store has. Needs
        ``measure``."""
        queries = self.dtype, (query_heads, self.recent, self.codec.key_size)
        made = *self.shapes().values(), *self.layout.tensors().values(), queries
        return sum(prod(shape) * dtype.itemsize for dtype, shape in made)

    def columns(self) -> dict[str, Column]:
        """Buffers with a row per slot, which move with the rows."""
        return self.codec.columns() | self.own_columns()

    def own_columns(self) -> dict[str, Column]:
        """Columns that no codec has."""
        absorbed: dict[str, Column] = {"absorbed": (torch.float32, ())} if self.merges else {}
        return {"positions": (torch.int32, ()), "scores": (torch.float32, ()), **absorbed}

    def holder(self, name: str) -> BoundedLayer | Codec:
        """The object that has a buffer."""
        return self if name == "stats" or name in self.own_columns() else self.codec

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[1, H, T, D]`` unchanged, after allocating the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    # ---- new rows ------------------------------------------------------------------------------------------------

    def append(
        self, k: Tensor, v: Tensor, score: Score, first_1: Tensor | None = None, position: Tensor | None = None
    ) -> None:
        """Write new rows after the newest one, and count them.

        Args:
            first_1: row that the first becomes in every head, and its ``position``, or each one's ``[T]``, where the device alone
                knows them.
        """
        T, seen, at = k.shape[2], self.seen if position is None else position, self.layout.following(k.shape[2])
        codec, plain = self.codec, self.launches and not self.merges
        k_HTD, v_HTD = k[0].to(codec.dtype), v[0].to(codec.dtype)  # autocast gives another
        if plain and type(codec) in (Plain, RowBits):  # one launch
            first = at[0] if self.layout.ragged else self.rows if first_1 is None else first_1
            keys, values, *levels = codec.flat()
            own = self.positions.flatten(), self.scores.flatten(), self.stats.flatten(1)
            rows = RowBuffers(keys, values, *own, levels)
            function("enter_rows", self.backend)(rows, first, k_HTD, v_HTD, seen, score, apart=self.capacity)
        else:
            new_T = torch.arange(T, device=self.device, dtype=torch.int32)
            at = at if first_1 is None else (ALL, first_1 + new_T)
            codec.write(at, k_HTD, v_HTD)
            # Writing a Python scalar through a device index copies it host-to-device and synchronises, so device scalars are.
            zero, given = self.scores.new_zeros(()), score.scores() if isinstance(score, HeadProduct) else score
            self.scores[at] = zero if given is None else given[0].to(zero.dtype)
            self.positions[at] = seen if isinstance(seen, Tensor) and seen.dim() else seen + new_T
            if self.statistics:
                self.stats[:, *at] = zero
            if self.merges:
                self.absorbed[at] = self.absorbed.new_full((), float("-inf"))
        self.count(T)

    def count(self, T: int) -> None:
        """``T`` rows more."""
        self.layout.count(T)
        self.seen += T
        self.since_eviction += T

    def can_take_back(self, tokens: int) -> bool:
        """Whether the newest tokens can be forgotten as though they had never come: they have changed nothing but their own
        rows, and an older one has come since the last eviction."""
        own = self.codec.takes_back and not (self.layout.ragged or self.statistics or self.recent or self.state)
        own = own and not (self.merges or self.store is not None)
        return own and self.rows > tokens < self.since_eviction and (self.window is None or self.rows == self.seen)

    def take_back(self, tokens: int) -> None:
        """Forget the newest tokens; ``can_take_back`` has said that it can be."""
        self.rows -= tokens
        self.seen -= tokens
        self.since_eviction -= tokens

    def append_queries(self, q_BQTD: Tensor) -> None:
        """Keep the newest ``recent`` queries at hand, where that is any."""
        if not hasattr(self, "queries"):
            _, Q, _, D = q_BQTD.shape
            with torch.inference_mode(False):
                self.queries = q_BQTD.new_zeros(Q, self.recent, D)
        T = q_BQTD.shape[2]
        # The buffer [Q, recent, D] moves up by T; clone, since source and target overlap.
        if self.recent > T:
            self.queries[:, :-T] = self.queries[:, T:].clone()
        self.queries[:, -T:] = q_BQTD[0, :, -self.recent :]

    # ---- what attention and policies read ------------------------------------------------------------------------

    def parts(self) -> Iterator[EqualLengthHeads]:
        """The rows as they lie, heads of equal length together."""
        for heads, at in self.layout.pieces():
            keys, values = (self.codec.read(name, at) for name in ("keys", "values"))
            yield EqualLengthHeads(heads, keys, values, self.stats[:, *at], self.positions[at])

    @property
    def uses_varlen(self) -> bool:
        """Whether one token's attention reads ``varlen`` and not ``parts``: wherever there are kernels for it, and where heads
        differ. PyTorch's attention may plan anew for every length, and takes keys that are rotated already."""
        plain = self.softmax.is_plain and self.codec.value_size == self.codec.key_size
        return plain and not self.codec.open and (self.codec.packed or self.layout.ragged or self.launches)

    def varlen(self) -> VarlenRows:
        """The rows as they are stored, of all heads together."""
        spans = Spans(*self.layout.spans(), self.layout.longest)
        # Statistics [statistics, N]: the axes of one of them are those of the positions.
        return VarlenRows(self.codec.flat(), self.positions.flatten(), self.stats.flatten(1), spans)

    def head(self, name: str, h: int) -> Tensor:
        """One head's rows of a buffer, of shape ``[rows, ...]``, in place."""
        return getattr(self.holder(name), name)[self.layout.head(h)]

    def slots(self, name: str) -> Tensor:
        """A buffer's rows ``[1, H, S, ...]`` (statistics: ``[statistics, 1, H, S]``), aligned to the right; 0 at padding."""
        at, padding = self.layout.slots()
        if name in ("keys", "values"):
            rows = self.codec.read(name, at)
            return rows if padding is None else rows.masked_fill(padding[..., None], 0)
        rows = self.stats[:, *at] if name == "stats" else getattr(self, name)[at]
        return rows if padding is None else rows.masked_fill(padding, 0)

    def kept(self) -> Tensor | list[list[Tensor]]:
        """Positions held now: ``[1, H, rows]``, or ``kept()[0][h]`` where heads differ."""
        return self.layout.kept(self.positions)

    # ---- eviction ------------------------------------------------------------------------------------------------

    def keep(self, chosen: Tensor, mean: int, others: Sequence[BoundedLayer] = ()) -> None:
        """Keep the ``chosen`` slots ``[L, H, S]`` or their index ``[L, H, K]`` (``Layout.keep``), here and in
        ``others``, layers of heads as long."""
        layers, buffers = [self, *others], []
        for rows in layers:
            rows.codec.read_all()
            # All that belongs to a slot moves together, or positions and rows would part.
            own = [getattr(rows, name) for name in rows.own_columns()]
            buffers.append([*rows.codec.moving(), *own, *rows.stats])
        self.layout.keep(chosen, mean, buffers, self.backend)
        for rows in layers:
            rows.rows, rows.since_eviction = mean, 0
            rows.codec.finish_block()

    def drop_oldest(self, keep: int) -> None:
        """Keep the newest ``keep`` rows (layers with a window)."""
        if self.rows > keep:
            newest, self.rows = self.layout.last(keep), keep
            for name in self.columns():
                buffer = getattr(self.holder(name), name)
                # clone, since source and target overlap where more than half stays
                buffer[self.layout.every()] = buffer[newest].clone()

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows at least, twice as many as before or more (full attention of unknown length). Raises
        ValueError where the buffers have another owner."""
        if self.external is not None:
            raise ValueError(f"buffers: room for {self.capacity} rows a head, {rows} are needed")
        # Doubling makes the copies of a whole text linear in its length.
        self.layout.capacity = max(rows, 2 * self.capacity)
        held = self.layout.every()
        with torch.inference_mode(False):
            for name, (dtype, row) in self.columns().items():
                old = getattr(self.holder(name), name)
                new = torch.empty(*self.layout.shape(self.capacity), *row, dtype=dtype, device=self.device)
                new[held] = old[held]
                setattr(self.holder(name), name, new)
            old, self.stats = self.stats, self.stats.new_empty(self.statistics, *self.layout.shape(self.capacity))
            self.stats[:, *held] = old[:, *held]
            self.codec.grow()

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
        self.seen = self.since_eviction = self.evictions = 0
        self.layout.clear()
        self.codec.clear()
        self.state.clear()
        if self.store is not None:
            self.store.clear()

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(CROPPING)

    @property
    def nbytes(self) -> int:
        """Bytes of the preallocated buffers and of the score's state."""
        # Every tensor that the layer, its layout and its codec hold is a buffer, so none can be forgotten here.
        held = (x for holder in (self, self.layout, self.codec) for x in holder.__dict__.values())
        stored = self.store.device_bytes if self.store is not None else 0
        return stored + sum(int(x.nbytes) for x in (*held, *self.state.values()) if isinstance(x, Tensor))
