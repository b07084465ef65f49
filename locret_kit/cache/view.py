"""What a policy sees of a layer: its slots, with keys, values and queries read only where they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..backbones.rope import Rope, rotate
from ..policies.base import Slots
from .storage.rows import BoundedLayer

if TYPE_CHECKING:
    from .bounded import BoundedCache


def slots_of(cache: BoundedCache, layer: int, keep: int, stabilizers: int) -> Slots:
    """What the cache's policy sees of a layer that must be cut to ``keep`` slots a head."""
    rows = cache.bounded[layer]
    stats = dict(zip(cache.statistics, rows.slots("stats"), strict=True))
    positions, valid = rows.slots("positions"), rows.valid()
    if "count" in cache.policy.statistics:
        stats["count"] = (rows.seen - positions).float()
    return Slots(
        layer=layer,
        layers=len(cache.layers),
        keep=keep,
        stabilizers=stabilizers,
        chunk=cache.schedule.chunk,
        since_eviction=rows.since_eviction,
        seen=rows.seen,
        positions=positions,
        valid=valid,
        entry_scores=rows.slots("scores"),
        stats=stats,
        keys=lambda: _keys(cache, layer, rows),
        values=lambda: rows.slots("values"),
        raw_keys=lambda: _raw_keys(cache, layer, rows),
        queries=lambda: _queries(cache, layer, rows),
        scaling=rows.scaling,
        seed=cache.seed,
        target=cache.heads.config.target if cache.heads is not None else "logit",
        lengths=rows.head_lengths,
        rope=cache.ropes[layer] if cache.ropes is not None else None,
        next_position=cache.places.next_place(valid.sum(-1), rows.seen),
        state=rows.state,
        backend=rows.backend,
    )


def _keys(cache: BoundedCache, layer: int, rows: BoundedLayer) -> Tensor:
    """Keys ``[B, H, S, D]`` as attention sees them."""
    keys = rows.slots("keys")
    if not cache.rotates_rows(rows):
        return keys
    assert cache.ropes is not None
    rope = cache.ropes[layer]
    if cache.places.by_rank:
        cos, sin = rows.per_head_tables(lambda n: cache.tables.first(rope, n, keys, rows.ragged), keys.shape[2])
    else:
        cos, sin = cache.tables.at(rope, _places(cache, rows), cache.places.span, keys)
    return rotate(keys, cos, sin)


def _places(cache: BoundedCache, rows: BoundedLayer) -> Tensor:
    """Positions ``[B, H, S]`` by which keys are rotated; 0 at padding."""
    valid = rows.valid()
    rank_BHS = valid.cumsum(-1) - 1
    return cache.places.place(rank_BHS, rows.slots("positions"), rows.seen).where(valid, 0)


def _raw_keys(cache: BoundedCache, layer: int, rows: BoundedLayer) -> Tensor:
    """Keys ``[B, H, S, D]`` before RoPE."""
    keys = rows.slots("keys")
    if cache.rotates_rows(rows):
        return keys
    assert cache.ropes is not None  # the policy needs an adapter
    return turned_back(cache.ropes[layer], keys, rows.slots("positions"))


def turned_back(rope: Rope, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys ``[..., D]`` before RoPE of keys rotated for ``positions [...]``."""
    cos, sin = (table.view(*positions.shape, -1) for table in rope.tables(positions.flatten(), keys.dtype))
    turned = rotate(keys, cos, -sin)
    turned[..., : cos.shape[-1]] /= rope.scaling**2
    return turned


def _queries(cache: BoundedCache, layer: int, rows: BoundedLayer) -> Tensor:
    """The newest queries ``[B, Q, W, D]``, rotated for the newest ``W`` rows."""
    W = min(rows.recent, rows.valid().shape[-1])
    if not W:
        raise ValueError(f"policy={cache.policy.name!r}: its score keeps no queries (Score.recent)")
    q = rows.queries[:, :, rows.recent - W :]
    if cache.ropes is None:
        return q
    rope = cache.ropes[layer]
    if not cache.rotates_rows(rows):
        return rotate(q, *cache.tables.between(rope, rows.seen - W, W, q))
    if cache.places.by_rank:
        cos, sin = rows.per_head_tables(lambda n: cache.tables.between(rope, n - W, W, q), W)
    else:
        cos, sin = (table[:, :, -W:] for table in cache.tables.at(rope, _places(cache, rows), cache.places.span, q))
        if not rows.ragged:
            cos, sin = cos[:, :1], sin[:, :1]
    if rows.ragged:
        G = q.shape[1] // cos.shape[1]
        cos, sin = cos.repeat_interleave(G, 1), sin.repeat_interleave(G, 1)
    return rotate(q, cos, sin)
