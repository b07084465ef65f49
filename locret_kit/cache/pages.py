"""Rows of one layer of many texts in one stretch of memory, which somebody else may own: a page for each text.

A page holds ``rows`` rows of every key/value head with all that a ``BoundedLayer`` keeps of them, so a text takes the same
memory however long it is. The rows of all pages lie end to end: a row has one number, by which one call reads those of several
texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .storage.rows import BoundedLayer, Page

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

    def lend(self, page: int, rows: BoundedLayer) -> None:
        """Let an empty layer keep its rows in a page: it may have less room than the page, and less of everything else."""
        H, D, capacity = self.shape.heads, self.shape.head_dim, rows.capacity
        # Heads stand this layer's capacity apart, not the page's: one with less room takes the page's beginning.
        first = page * H * self.shape.rows
        at = slice(first, first + H * capacity)
        whole = {name: getattr(self, name)[at] for name in ("keys", "values", "positions", "scores")}
        lent = {name: x.view(H, capacity, *x.shape[1:]) for name, x in whole.items()}
        lent["stats"] = self.stats[: rows.statistics, at].view(rows.statistics, H, capacity)
        rows.lent, rows.page = lent, Page(self, first)
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
