"""Layers of a bound cache: which store each of them has, and its size."""

from __future__ import annotations

from ..context import Context
from .blocks import BlockStore
from .float8 import Float8Layer, ReusedFloat8Layer
from .groups import SPARE
from .quantised import FLOAT8, QuantisedLayer, Scratch
from .ragged import RaggedLayer
from .ragged_quantised import RaggedQuantisedLayer
from .reused import ReusedLayer, reuses_rows
from .rows import BoundedLayer


def make_layers(ctx: Context, scratch: Scratch) -> list[BoundedLayer]:
    """One store per layer; quantised ones are read through ``scratch``."""
    chunk, policy = ctx.schedule.chunk, ctx.policy
    layers = []
    for window, budget in zip(ctx.spec.windows, ctx.budgets, strict=True):
        if window is not None:  # the rows that the window can still see beside one block, and no more
            rows = BoundedLayer(window - 1 + chunk, window)
        elif policy.keeps_everything:
            rows = _store(ctx, scratch, ctx.schedule.prompt_length or 0, spare=0.0)
        else:
            statistics = len(ctx.statistics) * (1 + ctx.group)
            rows = _store(ctx, scratch, budget + chunk, statistics, policy.recent(chunk))
            if policy.recall is not None:
                room = -(-(ctx.schedule.prompt_length or 0) // policy.recall.size)
                views = policy.recall.count(ctx.spec.n_heads // ctx.spec.n_kv_heads)
                rows.store = BlockStore(policy.recall.size, policy.recall.representatives, views, room)
        rows.backend = ctx.backend
        layers.append(rows)
    return layers


def _store(
    ctx: Context, scratch: Scratch, capacity: int, statistics: int = 0, recent: int = 0, spare: float = SPARE
) -> BoundedLayer:
    """Rows of one layer without a window."""
    policy, bits = ctx.policy, ctx.settings.kv_bits
    reused = reuses_rows(policy, bits) and ctx.backend != "reference"
    if bits == FLOAT8:
        return (ReusedFloat8Layer if reused else Float8Layer)(capacity, None, statistics, recent)
    if bits is not None:
        stored = RaggedQuantisedLayer if policy.ragged else QuantisedLayer
        return stored(capacity, statistics, recent, bits=bits, scratch=scratch, spare=spare)
    if reused:
        return ReusedLayer(capacity, None, statistics, recent)
    make = RaggedLayer if policy.ragged else BoundedLayer
    merges = policy.merge is not None and policy.merge.remembers
    return make(capacity, None, statistics, recent, merges=merges, centroids=policy.aside)
