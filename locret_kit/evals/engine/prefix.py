"""Prompts that begin alike: the order in which to answer them, and the caches of what they have in common.

A beginning is read once and its cache forked for every prompt (`BoundedCache.fork`). That equals a fresh run bit for bit
where the beginning ends at a multiple of ``chunk`` in front of both prompts' held-back tails; no other is shared.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...backbones.intercept import attach
from ...cache.bounded import BoundedCache
from ...cache.fork import CannotFork
from ...cache.geometry.schedule import Schedule
from ...runtime.session import prefill


@dataclass(frozen=True)
class Turn:
    """One prompt's turn."""

    prompt: int
    """Its number."""
    held: tuple[int, ...] = ()
    """Lengths in tokens, ascending, of the beginnings of this prompt whose caches are held meanwhile; it goes on from the
    last, the others are for later turns."""

    @property
    def shared(self) -> int:
        """Tokens that are not read anew."""
        return self.held[-1] if self.held else 0


def limit(schedule: Schedule, tokens: int) -> int:
    """The longest beginning of a prompt of so many tokens that may be shared: whole chunks, the last of them in front of
    the eviction before the tail."""
    if schedule.one_shot:
        return 0
    return max(0, tokens - schedule.local_len - 1) // schedule.chunk * schedule.chunk


def together(prompts: Sequence[array]) -> list[int]:
    """Numbers of the prompts in an order in which those with the longest common beginnings are neighbours."""
    return sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes())


def turns(prompts: Sequence[array], chunk: int, limits: Sequence[int]) -> Iterator[Turn]:
    """Every prompt once, in an order in which every common beginning of whole chunks is read once.

    Prompts that part from the others at a place come first there, then the smaller groups, the largest last: its cache
    is not copied but goes on, so of ``n`` prompts at most ``1 + log2(n)`` caches are held beside the one in use.

    Args:
        limits: see `limit`; one a prompt.
    """
    return _walk(prompts, list(range(len(prompts))), chunk, limits, 0, ())


def _walk(
    prompts: Sequence[array], members: list[int], chunk: int, limits: Sequence[int], at: int, held: tuple[int, ...]
) -> Iterator[Turn]:
    """Turns of prompts that agree in their first ``at`` tokens; ``held`` is for others."""
    while True:
        groups = _by_next_chunk(prompts, members, chunk, limits, at)
        if len(groups) == 1 and len(members) > 1:
            at += chunk
            continue
        here = (*held, at) if at and len(members) > 1 else held
        for group in groups[:-1]:
            yield from (
                [Turn(group[0], here)] if len(group) == 1 else _walk(prompts, group, chunk, limits, at + chunk, here)
            )
        members = groups[-1] if groups else []
        if len(members) < 2:
            yield from (Turn(one, here) for one in members)
            return
        at += chunk


def _by_next_chunk(
    prompts: Sequence[array], members: list[int], chunk: int, limits: Sequence[int], at: int
) -> list[list[int]]:
    """Members by their next chunk, the smallest group first; one that may share no further is alone."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in members:
        groups[prompts[i][at : at + chunk].tobytes() if at + chunk <= limits[i] else i].append(i)
    return sorted(groups.values(), key=len)


@dataclass(frozen=True)
class Start:
    """A cache that a prompt goes on from."""

    cache: BoundedCache
    shared: int = 0
    """Tokens that were read for other prompts too."""
    seconds: float = 0.0
    """Seconds in which the cache has read what it holds."""


@dataclass(frozen=True)
class _Beginning:
    ids: array
    cache: BoundedCache
    seconds: float


class Beginnings:
    """The caches of common beginnings, of one policy and budget.

    Args:
        fresh: makes an empty cache for a prompt of so many tokens.
        longest: tokens of the longest prompt; full attention's caches get room for it, so that none has to grow.
    """

    def __init__(self, model: Any, fresh: Callable[[int], BoundedCache], longest: int) -> None:
        self._model, self._fresh, self._longest = model, fresh, longest
        self._held: list[_Beginning] = []

    def start(self, turn: Turn, ids: array) -> Start:
        """What the turn's prompt goes on from: a fork, or an empty cache where nothing is shared or a fork would not equal
        a fresh run (budgets or frequencies that depend on the prompt's length)."""
        try:
            for length in turn.held:
                self._reach(ids, length, turn.held)
            self._held = [one for one in self._held if len(one.ids) in turn.held]
            if turn.held:
                last = max(self._held, key=lambda one: len(one.ids))
                return Start(last.cache.fork(len(ids)), len(last.ids), last.seconds)
        except CannotFork:
            self.drop()
        return Start(self._fresh(len(ids)))

    def drop(self) -> None:
        """Forget all caches; a later turn reads again what it needs."""
        self._held = []

    def _reach(self, ids: array, length: int, wanted: tuple[int, ...]) -> None:
        """Hold a cache of the first ``length`` tokens: the longest one that is held goes on, or a copy where it is wanted
        as it is."""
        self._held = [one for one in self._held if one.ids == ids[: len(one.ids)]]
        base = max((one for one in self._held if len(one.ids) <= length), key=lambda one: len(one.ids), default=None)
        if base is None:
            cache, seconds = self._fresh(self._longest), 0.0
        elif len(base.ids) == length:
            return
        elif len(base.ids) in wanted:
            cache, seconds = base.cache.fork(self._longest), base.seconds
        else:
            self._held.remove(base)
            cache, seconds = base.cache, base.seconds
        began = time.perf_counter()
        with attach(self._model):
            prefill(self._model, ids[:length], cache)
        self._held.append(_Beginning(ids[:length], cache, seconds + time.perf_counter() - began))
