"""One block of new tokens of a layer: they become rows, attend to what they see, and what they attend to gains by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from locret_kernels.backend import function

from .attention import attend_rows, attend_rows_lse
from .decoding import RowRotation, decode_rows
from .storage.rows import BoundedLayer, EqualLengthHeads

if TYPE_CHECKING:
    from .bounded import BoundedCache


def read_block(
    cache: BoundedCache, layer: int, rows: BoundedLayer, q: Tensor, k: Tensor, v: Tensor, scaling: float
) -> Tensor:
    """Attend over the rows and one block of new tokens, which become rows."""
    score_BHT = cache.entry_scores(layer, rows, rows.seen, q, k, v)
    rows.remember(q)
    if cache.ropes is not None and not cache.rotates_rows(rows):
        turned, tables = _rotate(cache), cache.tables.between(cache.ropes[layer], rows.seen, q.shape[2], q)
        q, k = turned(q, *tables), turned(k, *tables)
    rows.append(k, v, score_BHT)
    if q.shape[2] == 1 and rows.reads_flat and not _reads(cache, rows):
        assert cache.backend is not None
        flat = rows.flat()
        return decode_rows(
            q, flat, scaling, cache.backend, cache.statistics, _turn(cache, layer, rows, flat.longest, q)
        )
    G = q.shape[1] // k.shape[1]
    out = [
        _attend_part(cache, layer, rows, part, q[part.batch, part.heads.start * G : part.heads.stop * G], scaling)
        for part in rows.parts()
    ]
    return out[0] if len(out) == 1 else torch.cat(out, dim=1).view(*q.shape[:3], -1)


def _attend_part(
    cache: BoundedCache, layer: int, rows: BoundedLayer, part: EqualLengthHeads, q: Tensor, scaling: float
) -> Tensor:
    """Attention of heads of equal length; their slots gain its statistics. Rows are read in place, but
    where a reading leaves some out."""
    T, seen = q.shape[2], _visible(cache, rows, part)
    keys, values = _picked(part.keys, seen), _picked(part.values, seen)
    n = keys.shape[2]
    if cache.rotates_rows(rows):
        assert cache.ropes is not None
        rope = cache.ropes[layer]
        if cache.places.by_rank:
            cos, sin = cache.tables.first(rope, n, q, rows.ragged)
            newest = cos[-T:], sin[-T:]
        else:
            rank_S = torch.arange(n, device=q.device)
            at = cache.places.place(rank_S, _picked(part.positions, seen), rows.seen)
            cos, sin = cache.tables.at(rope, at, cache.places.span, q)
            newest = cos[0, 0, -T:], sin[0, 0, -T:]  # the newest tokens are placed alike in heads of equal length
        turned = _rotate(cache)
        keys, q = turned(keys, cos, sin), turned(q, *newest)
    if not len(part.stats):
        return attend_rows(q, keys, values, scaling, rows.window)
    assert cache.backend is not None
    out, lse = attend_rows_lse(q, keys, values, scaling, cache.backend)
    began = time.perf_counter()
    made = function("column_stats", cache.backend)(q, keys, scaling, lse, want=frozenset(cache.statistics))
    for stat, name in zip(part.stats, cache.statistics, strict=True):
        _add_picked(stat, getattr(made, name), seen)
    cache.counters.score_s += time.perf_counter() - began
    return out


def _rotate(cache: BoundedCache) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What rotates rows on the cache's device."""
    assert cache.backend is not None
    return function("rotate_rows", cache.backend)


def _reads(cache: BoundedCache, rows: BoundedLayer) -> bool:
    """Whether the tokens that this layer took last see what the policy's reading lets them see, and no more."""
    if cache.policy.prefill_mask is None or rows.window is not None or not rows.evictions:
        return False
    assert cache.schedule.body is not None
    return rows.seen <= cache.schedule.body


def _visible(cache: BoundedCache, rows: BoundedLayer, part: EqualLengthHeads) -> tuple[slice, ...] | None:
    """Slices of a part's rows that the newest tokens see; None for all."""
    mask = cache.policy.prefill_mask
    return mask.visible(part.keys.shape[2], rows.since_eviction) if mask is not None and _reads(cache, rows) else None


def _turn(cache: BoundedCache, layer: int, rows: BoundedLayer, longest: int, like: Tensor) -> RowRotation | None:
    """How one token's attention rotates keys that are stored before RoPE, of heads with at most ``longest`` rows."""
    if not cache.rotates_rows(rows):
        return None
    assert cache.ropes is not None and cache.places.span is not None
    seen = None if cache.places.by_rank else torch.full((), rows.seen, device=like.device)
    cos, sin = cache.tables.upto(cache.ropes[layer], max(cache.places.span, longest), like)
    return RowRotation(cos, sin, cache.places.span, seen)


def _picked(rows: Tensor, seen: tuple[slice, ...] | None) -> Tensor:
    """The rows ``[b, h, S, ...]`` that are seen, one behind the other."""
    return rows if seen is None else torch.cat([rows[:, :, piece] for piece in seen], dim=2)


def _add_picked(stat_bhS: Tensor, made: Tensor, seen: tuple[slice, ...] | None) -> None:
    """Add what was made of the rows that are seen to a statistic of all rows, in place."""
    start = 0
    for piece in seen or (slice(None),):
        target = stat_bhS[..., piece]
        target += made[..., start : start + target.shape[-1]]
        start += target.shape[-1]
