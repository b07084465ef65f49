"""One token of each of several texts whose rows lie in one pool: written at once, and attended to in one call. Evictions stay
those of each text. The same step as ``step.read_tokens`` of each, but for rounding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..backbones.rope import Rope
from .attend import RowRotation, VarlenRows, decode_rows
from .context import Context
from .rotation import RotationTables
from .step import evict_if_due, make_room
from .storage.rows import BoundedLayer
from .view import entry_scores

# ---- rows of one layer of many texts in one stretch of memory, which somebody else may own --------------------------

# A page for each text.
#
# A page holds ``rows`` rows of every key/value head with all that a ``BoundedLayer`` keeps of them, so a text takes the same
# memory however long it is. The rows of all pages lie end to end: a row has one number, by which one call reads those of several
# texts.


ALIGNMENT = 8
"""Bytes: a row's are a multiple of it, so that buffers of every type begin where they may."""


@dataclass(frozen=True)
class PageShape:
    """Sizes of a text's page in one layer."""

    heads: int
    """Key/value heads."""
    query_heads: int
    head_dim: int
    rows: int
    """Of a head, at most."""
    dtype: torch.dtype
    statistics: int = 0
    recent: int = 0
    """Newest queries at hand."""

    @classmethod
    def of(
        cls, layers: Iterable[BoundedLayer], heads: int, query_heads: int, head_dim: int, dtype: torch.dtype
    ) -> PageShape:
        """The page that is large enough for any of these layers, which need not have met a token."""
        layers = list(layers)
        largest = (max(getattr(rows, name) for rows in layers) for name in ("capacity", "statistics", "recent"))
        rows, statistics, recent = largest
        return cls(heads, query_heads, head_dim, rows, dtype, statistics, recent)

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's row, with its share of the newest queries."""
        # Key and value, int32 position and float32 score, float32 statistics.
        own = 2 * self.head_dim * self.dtype.itemsize + 4 + 4 + 4 * self.statistics
        # Queries are the text's and not a row's: shared out, a page is still a number of rows of one size.
        queries = self.query_heads * self.recent * self.head_dim * self.dtype.itemsize
        whole = own + -(-queries // (self.heads * self.rows))
        return -(-whole // ALIGNMENT) * ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.heads * self.rows * self.row_bytes


class RowPool:
    """The pages of one layer. ``N`` rows: those of page 0, head after head, then those of page 1.

    Args:
        memory: contiguous, ``pages * shape.nbytes`` bytes of it or more. Nothing is read before it was written.

    Raises:
        ValueError: too little memory, or memory that does not lie in one stretch.
    """

    keys: Tensor
    """``[N, D]``, as the values."""
    values: Tensor
    positions: Tensor
    """``[N]`` int32."""
    scores: Tensor
    """``[N]`` float32."""
    stats: Tensor
    """``[statistics, N]`` float32."""
    queries: Tensor
    """``[pages, Q * recent * D]``."""

    def __init__(self, shape: PageShape, memory: Tensor, pages: int) -> None:
        if not memory.is_contiguous() or memory.nbytes < pages * shape.nbytes:
            raise ValueError(f"memory: {memory.nbytes} bytes must be {pages * shape.nbytes}, in one stretch")
        self.shape, self.pages, self.device = shape, pages, memory.device
        self._left = memory.flatten().view(torch.uint8)
        N = pages * shape.heads * shape.rows
        self.keys, self.values = (self._cut(shape.dtype, N, shape.head_dim) for _ in range(2))
        self.queries = self._cut(shape.dtype, pages, shape.query_heads * shape.recent * shape.head_dim)
        self.positions, self.scores = self._cut(torch.int32, N), self._cut(torch.float32, N)
        self.stats = self._cut(torch.float32, shape.statistics, N)

    def _cut(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The next so many bytes of the memory."""
        size = prod(shape) * dtype.itemsize
        cut, self._left = self._left[:size], self._left[size:]
        return cut.view(dtype).view(shape)

    def first(self, page: int) -> int:
        """Number of a page's first row."""
        return page * self.shape.heads * self.shape.rows

    def lend(self, page: int, rows: BoundedLayer) -> None:
        """Let an empty layer keep its rows in a page: it may have less room than the page, and less of everything else."""
        H, D, capacity = self.shape.heads, self.shape.head_dim, rows.capacity
        # Heads stand this layer's capacity apart, not the page's: one with less room takes the page's beginning.
        at = slice(self.first(page), self.first(page) + H * capacity)
        whole = {name: getattr(self, name)[at] for name in ("keys", "values", "positions", "scores")}
        lent = {name: x.view(H, capacity, *x.shape[1:]) for name, x in whole.items()}
        lent["stats"] = self.stats[: rows.statistics, at].view(rows.statistics, H, capacity)
        rows.lent = lent
        # Nothing is allocated: the layer finds its buffers in what is lent.
        empty = self.keys.new_empty(1, H, 0, D)
        rows.lazy_initialization(empty, empty)
        if rows.recent:
            Q = self.shape.query_heads
            rows.queries = self.queries[page, : Q * rows.recent * D].view(Q, rows.recent, D)

    def put(self, at: Tensor, k: Tensor, v: Tensor, scores: Tensor, positions: Tensor) -> None:
        """Write rows by their numbers ``at``: keys and values ``[*at, D]``, without counting them."""
        self.keys[at], self.values[at] = k, v
        self.scores[at], self.positions[at] = scores, positions
        # A tensor, no number: a scalar through an index on the device would be copied there every time.
        if len(self.stats):
            self.stats[:, at] = self.stats.new_zeros(())


# ---- one token of each of several texts whose rows lie in one pool ----


@dataclass(frozen=True, eq=False)
class Places:
    """Where the next token of each text goes, and what it sees."""

    at_NH: Tensor
    """Number of its row in each head."""
    starts_NH: Tensor
    lengths_NH: Tensor
    """Rows that it sees, its own included."""
    seen_N1: Tensor
    """Tokens of each text before it (int32)."""
    longest: int


class Step:
    """Numbers of one forward that layers share: one copy to the device for all that have the same counts."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Places] = {}
        self._turns: dict[tuple[Places, int], RowRotation] = {}

    def places(self, pool: RowPool, pages: Sequence[int], rows: Sequence[BoundedLayer]) -> Places:
        """Places of the next token of texts in such pages."""
        # Layers of equal counts share their places: that is all layers but those with a window.
        numbers = tuple(
            (pool.first(page), one.capacity, one.rows, one.seen) for page, one in zip(pages, rows, strict=True)
        )
        if numbers not in self._made:
            first_N, room_N, rows_N, seen_N = torch.tensor(numbers, device=pool.device).T
            # A page holds head after head, each with room for `capacity` rows of this layer.
            head_H = torch.arange(pool.shape.heads, device=pool.device)
            starts_NH = first_N[:, None] + head_H * room_N[:, None]
            lengths_NH = (rows_N + 1)[:, None].expand_as(starts_NH).contiguous()
            longest = 1 + max(rows for _, _, rows, _ in numbers)
            at_NH = starts_NH + rows_N[:, None]
            self._made[numbers] = Places(at_NH, starts_NH, lengths_NH, seen_N[:, None].int(), longest)
        return self._made[numbers]

    def turn(self, places: Places, rope: Rope, tables: RotationTables, like: Tensor) -> RowRotation:
        """Rotation of rows that are placed by their rank alone, see ``kind``."""
        key = places, id(rope)
        if key not in self._turns:
            cos_sin, of_queries = (tables.upto(one, places.longest, like) for one in (rope, rope.of_queries))
            newest = RowRotation.tables_at(places.lengths_NH - 1, *of_queries)
            self._turns[key] = RowRotation(*cos_sin, *of_queries, newest=newest)
        return self._turns[key]


def kind(ctx: Context) -> Hashable | None:
    """Texts of the same kind, which share their rotations, are decoded together. None for one that is read alone: it has stages
    or a prefill mask of its own, its heads differ, or its rows are placed by more than their rank."""
    if ctx.stages or ctx.policy.prefill_mask is not None or ctx.policy.ragged or ctx.positions.span not in (None, 0):
        return None
    # Rotations by identity: tables are shared by the object, see RotationTables.
    return ctx.positions.span, ctx.statistics, ctx.group, ctx.backend.name, id(ctx.ropes)


def decode_together(
    contexts: Sequence[Context],
    layer: int,
    rows: Sequence[BoundedLayer],
    pool: RowPool,
    pages: Sequence[int],
    step: Step,
    q_NQD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    score_NH: Tensor | None = None,
) -> Tensor:
    """Attention output ``[N, Q, D]`` of one new token of each text, which become rows; texts evict where it is due.

    Args:
        contexts: of one ``kind``. rows, pages: of each text in this layer. score_NH: entry scores, where they are known.
    """
    ctx, one = contexts[0], rows[0]
    texts = list(zip(contexts, rows, strict=True))
    # Room first: an eviction moves rows, and places are numbers of rows.
    for own, mine in texts:
        make_room(own, layer, mine, own.due(layer, mine, 1))
    if score_NH is None:
        alone = zip(texts, *(x[:, None, :, None] for x in (q_NQD, k_NHD, v_NHD)), strict=True)  # [1, heads, 1, D]
        made = [entry_scores(own, layer, mine, mine.seen, q, k, v) for (own, mine), q, k, v in alone]
        score_NH = torch.cat(made)[..., 0]
    # As they came: a score rotates the newest queries for the rows that an eviction leaves.
    for n, mine in enumerate(rows):
        if mine.recent:
            mine.remember(q_NQD[n : n + 1, :, None])
    places, q_NQ1D = step.places(pool, pages, rows), q_NQD[:, :, None]
    if (rope := ctx.write_rope(layer, one)) is not None:
        seen = tuple(mine.seen for mine in rows)
        cos_sin, of_queries = (ctx.tables.each(part, seen, q_NQD) for part in (rope, rope.of_queries))
        k_NHD = ctx.backend.rotate(k_NHD[:, :, None], *(x[:, None, None] for x in cos_sin))[:, :, 0]
        q_NQ1D = ctx.backend.rotate(q_NQ1D, *(x[:, None, None] for x in of_queries))
    # One write for all texts. Rows are counted after it: until then the pages say where the new ones go.
    pool.put(places.at_NH, k_NHD, v_NHD, score_NH, places.seen_N1)
    statistics = ctx.statistics if one.window is None else ()
    stats = pool.stats[: len(statistics) * (1 + ctx.group)]
    flat = VarlenRows(
        (pool.keys, pool.values), pool.positions, stats, places.starts_NH, places.lengths_NH, places.longest
    ).newest(one.window)
    rope = ctx.read_rope(layer, one)
    turn = None if rope is None else step.turn(places, rope, ctx.tables, q_NQD)
    out = decode_rows(q_NQ1D, flat, one.scaling, ctx.backend.name, statistics, turn, ctx.group)
    # Each by its own schedule; what moves lies in its own page.
    for own, mine in texts:
        mine.count(1)
        evict_if_due(own, layer, mine)
    return out[:, :, 0]
