"""An independent copy of a cache that goes on with another prompt of the same beginning."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .bounded import BoundedCache


class CannotFork(ValueError):
    """A copy would not hold what a fresh run of that prompt holds."""


def fork(cache: BoundedCache, prompt_length: int | None) -> BoundedCache:
    """See ``BoundedCache.fork``."""
    cache.refuse_interrupted()
    s, seen = cache.schedule, cache.get_seq_length()
    if s.one_shot and prompt_length != s.prompt_length:
        raise CannotFork(
            f"prompt_length={prompt_length}: a one-shot cache has the room and the schedule of its own {s.prompt_length} tokens"
        )
    settings = replace(cache.settings.run, budget=cache.settings.share or s.budget)
    if prompt_length is None:
        settings = replace(settings, decode_every=None)
    new = type(cache)(settings, cache.policy, cache.heads, prompt_length=prompt_length)
    if cache.spec is None:
        return new
    if new.schedule.body is not None and seen > new.schedule.body:
        raise CannotFork(
            f"prompt_length={prompt_length}: {seen} tokens are read already, more than the {new.schedule.body} before its tail"
        )
    if s.decoding(seen):
        raise CannotFork("this cache has decoded already: fork it before")
    new.bind(cache.model)
    if not cache.policy.keeps_everything:
        _require_same_past(cache, new, seen)
    for mine, theirs in zip(new.bounded, cache.bounded, strict=True):
        mine.copy_from(theirs)
    new.counters = replace(cache.counters)
    new.last_hidden = None if cache.last_hidden is None else cache.last_hidden.clone()
    return new


def _require_same_past(old: BoundedCache, new: BoundedCache, seen: int) -> None:
    """Raise CannotFork where a run of ``new`` would not hold what ``old`` holds after ``seen`` tokens."""
    for i, (mine, theirs) in enumerate(zip(old.budgets, new.budgets, strict=True)):
        before, after = old.schedule.evictions(seen, mine), new.schedule.evictions(seen, theirs)
        if old.bounded[i].window is None and before != after:
            raise CannotFork(
                f"prompt_length={new.schedule.prompt_length}: after {seen} tokens a fresh run would have evicted "
                f"{len(after)} times, this cache {len(before)} times or otherwise"
            )
        if mine != theirs:
            raise CannotFork(f"layer {i} has a budget of {mine} here and of {theirs} in a prompt of that length")
    for a, b in zip(old.ropes or [], new.ropes or [], strict=True):
        if a.scaling != b.scaling or not torch.equal(a.inv_freq, b.inv_freq):
            raise CannotFork("a prompt of that length is rotated by other frequencies (LongRoPE)")
