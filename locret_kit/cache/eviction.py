"""One eviction: the slots are scored, some are chosen, the others are merged into them or dropped, the rows move up."""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backbones.rope import rotate
from ..policies.base import Slots
from .storage.rows import BoundedLayer
from .view import slots_of, turned_back

if TYPE_CHECKING:
    from .bounded import BoundedCache


def make_room(cache: BoundedCache, layer: int, rows: BoundedLayer, step: int) -> None:
    """Before a block is appended: windowed layers forget what no query can see; decoding evicts when full."""
    if rows.rows + step > rows.capacity:
        if rows.window is not None:
            rows.drop_oldest(rows.window - 1)
        elif cache.policy.keeps_everything:
            rows.grow(rows.rows + step)
        else:
            evict(cache, layer, rows, cache.budgets[layer], decoding=True)


def evict_if_due(cache: BoundedCache, layer: int, rows: BoundedLayer) -> None:
    """At a boundary of the schedule."""
    if rows.window is None:
        keep = cache.schedule.keep_at(rows.seen, rows.rows, cache.budgets[layer])
        if keep is not None:
            evict(cache, layer, rows, keep, decoding=cache.schedule.decoding(rows.seen))


def evict(cache: BoundedCache, layer: int, rows: BoundedLayer, keep: int, *, decoding: bool) -> None:
    """Cut a layer to ``keep`` slots a head, on average where heads differ."""
    policy, counters = cache.policy, cache.counters
    if policy.keeps_everything or rows.rows <= keep:
        return
    stabilizers = 0 if cache.schedule.is_last(rows.seen) and not decoding else cache.schedule.stabilizers
    slots = slots_of(cache, layer, keep, min(stabilizers, keep))
    t0 = time.perf_counter()
    scores_BHS = policy.score.score_slots(slots)
    rows.set_entry_scores(slots.entry_scores)
    t1 = time.perf_counter()
    stay_BHS = policy.choose(slots, scores_BHS)
    t2 = time.perf_counter()
    count_eviction(cache, rows, slots.valid.shape[:2].numel() * (rows.rows - keep))
    if policy.merge is not None:
        merge(cache, layer, rows, slots, scores_BHS, stay_BHS)
    rows.keep(stay_BHS, keep)
    counters.score_s += t1 - t0
    counters.select_s += t2 - t1
    counters.compact_s += time.perf_counter() - t2


def merge(
    cache: BoundedCache, layer: int, rows: BoundedLayer, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor
) -> None:
    """Fold the slots that go into those that stay, in place and one head at a time: beside the buffers there are never more
    than a head's rows in float32."""
    assert cache.ropes is not None and cache.policy.merge is not None
    rope = None if cache.rotates_rows(rows) else cache.ropes[layer]  # None: keys are stored before RoPE
    merger = cache.policy.merge
    told_BHS = merger.told(cache.policy, slots, scores_BHS, stay_BHS)
    B, H, S = stay_BHS.shape
    for b, h in product(range(B), range(H)):
        keys, values, positions = (rows.head(name, b, h) for name in ("keys", "values", "positions"))
        held = slice(S - len(keys), S)
        told_S = told_BHS[b, h, held]
        if merger.remembers:
            told_S = torch.logaddexp(told_S, rows.head("absorbed", b, h))
        exact = torch.promote_types(keys.dtype, torch.float32)
        raw = keys.to(exact) if rope is None else turned_back(rope, keys.to(exact), positions)
        new = merger.fold(layer, raw, values.to(exact), told_S, stay_BHS[b, h, held])
        at, folded = new.slots_R, new.keys_RD
        if rope is not None:
            folded = rotate(folded, *rope.tables(positions[at], exact))
        keys[at], values[at] = folded.to(keys.dtype), new.values_RD.to(values.dtype)
        if merger.remembers:
            absorbed = rows.head("absorbed", b, h)
            assert new.gained_R is not None
            absorbed[at] = torch.logaddexp(absorbed[at], new.gained_R)


def count_eviction(cache: BoundedCache, rows: BoundedLayer, evicted: int) -> None:
    """An eviction of ``evicted`` rows, of all heads together."""
    rows.evictions += 1
    cache.counters.evictions = max(cache.counters.evictions, rows.evictions)
    cache.counters.evicted_rows += evicted
