"""Between the two readings of the prompt's tail: see ``policies.answering``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies.base import Policy
from .schedule import Schedule
from .view import slots_of

if TYPE_CHECKING:
    from .bounded import BoundedCache


def check_answering(policy: Policy, schedule: Schedule) -> None:
    """Raise ValueError where the prompt's end cannot be read twice as the policy asks; names setting and bound."""
    if policy.answering is None:
        return
    name, s = f"policy={policy.name!r}", schedule
    if s.prompt_length is None:
        raise ValueError(f"{name} reads the end of the prompt twice: pass prompt_length=")
    if not 1 <= s.local_len <= s.chunk:
        raise ValueError(
            f"{name} reads the prompt's last local_len={s.local_len} tokens twice: from 1 to chunk={s.chunk} of them"
        )
    if policy.merge is not None:
        raise ValueError(f"{name}: answering= drops slots, merge= drops none: one of them")


def looking(cache: BoundedCache, seen: int) -> bool:
    """Whether what is read after ``seen`` tokens is the tail's first reading, of which only the choice of slots is left."""
    return cache.looks_twice and seen >= (cache.schedule.body or 0)


def look_again(cache: BoundedCache) -> int:
    """Where the tail has been read for the first time, cut every layer to what it asked for and forget the tail; how many
    tokens are to be read once more."""
    if not cache.looks_twice or cache.get_seq_length() != cache.schedule.prompt_length:
        return 0
    answering, tail, counters = cache.policy.answering, cache.schedule.tail, cache.counters
    for layer, rows in enumerate(cache.bounded):
        if rows.window is not None:
            rows.drop_newest(tail)
        else:
            held = rows.rows - tail
            keep = min(answering.size(cache.budgets[layer], tail), held)
            stay_BHS = answering.choose(slots_of(cache, layer, keep, 0), tail, held)
            counters.evicted_rows += (held - keep) * stay_BHS.shape[0] * stay_BHS.shape[1]
            rows.evictions += 1
            rows.keep(stay_BHS, keep)
        rows.seen -= tail
    counters.evictions = max(rows.evictions for rows in cache.bounded)
    cache.looked = True
    return tail
