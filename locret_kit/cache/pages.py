"""Rows of one layer of many texts in one stretch of memory, which may have another owner: a page for each text.

A page holds ``rows`` rows of every key/value head with all that a ``BoundedLayer`` keeps of them. So a text takes the
same memory at any length. The rows of all pages lie end to end. Each row has one number, so one call reads rows of
several texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from transformers import PretrainedConfig

from locret_kernels.rows import RowBuffers

from ..backbones.spec import AttentionLayer, BackboneSpec, spec_of
from ..backbones.stand_in import config_of_rank
from ..policies import Policy
from ..policies.capabilities import reason
from ..settings import Resolved
from .bounded import BoundedCache
from .context import layer_rows, make_layers
from .state import TextState
from .storage.codec import Scratch
from .storage.exports import copy_rows
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
    """Largest number of rows of a head."""
    dtype: torch.dtype
    statistics: int = 0
    recent: int = 0
    """Newest queries at hand."""

    @classmethod
    def of(cls, texts: Iterable[BoundedLayer], layer: AttentionLayer, dtype: torch.dtype) -> PageShape:
        """The page of a layer that is large enough for its rows in any of these texts, which need not have met a token."""
        texts = list(texts)
        rows, *more = (max(getattr(rows, name) for rows in texts) for name in ("capacity", "statistics", "recent"))
        return cls(layer.n_kv_heads, layer.n_heads, layer.key_size, rows, dtype, *more)

    @classmethod
    def for_policies(
        cls, spec: BackboneSpec, settings: Resolved, policies: Iterable[Policy], dtype: torch.dtype
    ) -> list[PageShape]:
        """Pages of every layer that are large enough for a text of any of these policies."""
        sizes, policies = (settings.budget + settings.chunk, settings.chunk), list(policies)
        rows_L = ([layer_rows(p, layer, *sizes, None, Scratch()) for p in policies] for layer in spec.layers)
        return [cls.of(rows, layer, dtype) for rows, layer in zip(rows_L, spec.layers, strict=True)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's row, with its share of the newest queries."""
        # Key and value, int32 position and float32 score, float32 statistics.
        own = 2 * self.head_dim * self.dtype.itemsize + 4 + 4 + 4 * self.statistics
        # Queries are the text's and not a row's: shared out, a page is still a number of rows of one size.
        queries = self.query_heads * self.recent * self.head_dim * self.dtype.itemsize
        whole = own + -(-queries // (self.heads * self.rows))
        return -(-whole // ALIGNMENT) * ALIGNMENT

    def holds(self, other: PageShape) -> bool:
        """Whether rows of another shape fit into a page."""
        return self == replace(other, rows=self.rows, statistics=self.statistics, recent=self.recent) and (
            self.rows >= other.rows and self.statistics >= other.statistics and self.recent >= other.recent
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.heads * self.rows * self.row_bytes

    def pool(self, memory: Tensor, pages: int) -> RowPool:
        """As many pages in one stretch of memory, see ``RowPool``."""
        return RowPool(self, memory, pages)


def page_bytes(
    config: PretrainedConfig, settings: Resolved, policies: Iterable[Policy], dtype: torch.dtype, ranks: int = 1
) -> int:
    """Bytes of a text's pages on one rank, of a model whose heads are split over ``ranks``; those of its layers are alike."""
    shapes = PageShape.for_policies(spec_of(config_of_rank(config, ranks)), settings, policies, dtype)
    return max(shape.nbytes for shape in shapes) * len(shapes)


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
        """Cut the buffers ``[pages * H * S, D]`` and so on from ``memory``, which is contiguous. Raises RuntimeError where it is
        too small."""
        self.shape, self.pages, self.device = shape, pages, memory.device
        self._left = memory.view(-1).view(torch.uint8)
        N = pages * shape.heads * shape.rows
        self.keys, self.values = (self._cut(shape.dtype, N, shape.head_dim) for _ in range(2))
        self.queries = self._cut(shape.dtype, pages, shape.query_heads * shape.recent * shape.head_dim)
        self.positions, self.scores = self._cut(torch.int32, N), self._cut(torch.float32, N)
        self.stats = self._cut(torch.float32, shape.statistics, N)

    def _cut(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The next part of the memory, with a dtype and a shape."""
        size = prod(shape) * dtype.itemsize
        cut, self._left = self._left[:size], self._left[size:]
        return cut.view(dtype).view(shape)

    def bind(self, page: int, rows: BoundedLayer) -> None:
        """Let an empty layer keep its rows in a page: it may have less room than the page, and less of everything else."""
        H, D, capacity = self.shape.heads, self.shape.head_dim, rows.capacity
        # Heads stand this layer's capacity apart, not the page's: one with less room takes the page's beginning.
        first = page * H * self.shape.rows
        at = slice(first, first + H * capacity)
        whole = {name: getattr(self, name)[at] for name in ("keys", "values", "positions", "scores")}
        buffers = {name: x.view(H, capacity, *x.shape[1:]) for name, x in whole.items()}
        buffers["stats"] = self.stats[: rows.statistics, at].view(rows.statistics, H, capacity)
        rows.external, rows.page = buffers, Page(self, first)
        # Nothing is allocated: the layer finds its buffers in those.
        empty = self.keys.new_empty(1, H, 0, D)
        rows.lazy_initialization(empty, empty)
        if rows.recent:
            Q = self.shape.query_heads
            rows.queries = self.queries[page, : Q * rows.recent * D].view(Q, rows.recent, D)

    @property
    def rows(self) -> RowBuffers:
        """All rows, for ``enter_rows``."""
        return RowBuffers(self.keys, self.values, self.positions, self.scores, self.stats)

    def append_queries(self, first_N: Tensor, q_NQD: Tensor, recent: int) -> None:
        """Make a query of each text, whose page has that first row, the newest of the ``recent`` ones that it keeps."""
        (N, Q, D), page_N = q_NQD.shape, first_N // (self.shape.heads * self.shape.rows)
        own = page_N, slice(Q * recent * D)
        newest = torch.cat((self.queries[own].view(N, Q, recent, D)[:, :, 1:], q_NQD[:, :, None]), 2)
        self.queries[own] = newest.flatten(1)


class PagePool:
    """Pages of texts in all layers: what holds the caches of an engine, so that their tokens are made in one call a layer.

    Args:
        pages: texts at once. Memory is taken when the first text comes, whose rows say how large a page is; a text that needs
            more, or has rows of another kind, keeps its own.
    """

    def __init__(self, pages: int) -> None:
        self.pages, self._free = pages, list(range(pages))
        self._pools: list[RowPool] = []
        self._texts: WeakSet[TextState] = WeakSet()

    def enter(self, cache: BoundedCache) -> None:
        """Move a text's rows into a page, which is free again when the cache is gone."""
        ctx = cache.context
        plain = reason("page", ctx.subject) is None and not any(rows.chunked or rows.page for rows in cache.bounded)
        if not (self._free and plain and len({weight.device for weight in ctx.model.parameters()}) == 1):
            return
        pairs = zip(cache.bounded, ctx.spec.layers, strict=True)
        shapes = [PageShape.of([rows], layer, ctx.model.dtype) for rows, layer in pairs]
        if not self._pools:
            with torch.inference_mode(False):  # so that rows can be written outside of it too
                sizes_L = [self.pages * shape.nbytes for shape in shapes]
                memory_L = [torch.empty(size, dtype=torch.uint8, device=ctx.model.device) for size in sizes_L]
                self._pools = [RowPool(*pair, self.pages) for pair in zip(shapes, memory_L, strict=True)]
        if not all(pool.shape.holds(shape) for pool, shape in zip(self._pools, shapes, strict=True)):
            return
        page = self._free.pop()
        finalize(cache, self._free.append, page)
        layers = make_layers(ctx, cache.state.scratch)
        for pool, rows, old in zip(self._pools, layers, cache.bounded, strict=True):
            pool.bind(page, rows)
            copy_rows(rows, old)
        cache.bounded[:] = layers
        cache.state.share_rotations(self._texts)
        self._texts.add(cache.state)
