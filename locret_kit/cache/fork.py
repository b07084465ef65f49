"""Conditions under which a copy of a cache may go on with another prompt of the same beginning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from ..backbones.decoder_attention import same_rotation
from .context import Context
from .geometry.schedule import Schedule
from .storage.bits import BITS


class CannotFork(ValueError):
    """A copy would not hold what a fresh run of that prompt holds."""


def check_lengths(old: Schedule, new: Schedule, seen: int) -> None:
    """Raise CannotFork where ``seen`` tokens reach into the new prompt's tail, or past the old prompt."""
    if new.body is not None and seen > new.body:
        raise CannotFork(
            f"prompt_length={new.prompt_length}: {seen} tokens are read already, more than the {new.body} before its tail"
        )
    # Decoded tokens are no part of another prompt.
    if old.decoding(seen):
        raise CannotFork("this cache has decoded already: fork it before")


def check_past(old: Context, new: Context, windows: Sequence[int | None], seen: int) -> None:
    """Raise CannotFork where a run of ``new`` would not hold what ``old`` holds after ``seen`` tokens."""
    if not same_rotation(old.ropes or [], new.ropes or []):
        raise CannotFork("a prompt of that length is rotated by other frequencies (LongRoPE)")
    if new.policy.keeps_everything:
        return
    if old.settings.kv_bits in BITS and new.schedule.capacity < old.schedule.capacity:
        raise CannotFork(
            f"prompt_length={new.schedule.prompt_length}: rows in {old.settings.kv_bits} bits need the room of the longer prompt"
        )
    # Integers alone: the evictions of both runs so far, simulated once for layers of equal budgets.
    earlier, later = cache(partial(old.schedule.evictions, seen)), cache(partial(new.schedule.evictions, seen))
    for i, (mine, theirs, window) in enumerate(zip(old.budgets, new.budgets, windows, strict=True)):
        before, after = earlier(mine), later(theirs)
        if window is None and before != after:
            raise CannotFork(
                f"prompt_length={new.schedule.prompt_length}: after {seen} tokens a fresh run would have evicted "
                f"{len(after)} times, this cache {len(before)} times or otherwise"
            )
        if mine != theirs:
            raise CannotFork(f"layer {i} has a budget of {mine} here and of {theirs} in a prompt of that length")


def check_budget(old: Context, new: Context) -> None:
    """Raise CannotFork where rows that ``old`` has read would be rotated otherwise with the budget of ``new``."""
    if not same_rotation(old.ropes or [], new.ropes or []):
        raise CannotFork(
            f"budget={new.settings.budget}: so many slots are rotated by other frequencies (LongRoPE) than the "
            f"{old.settings.budget} with which the text was read: read it with more, or take fewer for the turns (history)"
        )


def check_queries(old: Sequence[int], new: Sequence[int], seen: int) -> None:
    """Raise CannotFork where a prompt of another length keeps another number of its newest queries, per layer."""
    # A prompt that keeps more queries would have kept some that are gone.
    if seen and old != new:
        raise CannotFork(f"{max(old)} queries are kept here, and {max(new)} in a prompt of that length")
