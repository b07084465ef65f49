"""Prompts that begin alike: the order in which to answer them, and the caches of what they have in common.

A beginning is read once and its cache forked for every prompt (`BoundedCache.fork`). That equals a fresh run bit for bit
where the beginning ends at a multiple of ``chunk`` before both prompts' held-back tails; no other is shared.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...backbones.intercept import attach
from ...cache.bounded import BoundedCache
from ...cache.fork import CannotFork
from ...cache.geometry.schedule import Schedule
from ...runtime.session import prefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Turn = tuple[int, tuple[int, ...]]
"""A prompt's number, and the lengths in tokens, ascending, of those of its beginnings whose caches are held meanwhile. It goes
on from the last one, the others are for later turns."""


def max_shared_prefix(schedule: Schedule, tokens: int) -> int:
    """The longest beginning of a prompt of so many tokens that may be shared: whole chunks, the last of them before the
    eviction that precedes the tail."""
    return 0 if schedule.one_shot else schedule.safe(tokens - 1)


def order_by_prefix(prompts: Sequence[array[int]]) -> list[int]:
    """Numbers of the prompts in an order in which those with the longest common beginnings are neighbours."""
    return sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes())


def turns(prompts: Sequence[array[int]], chunk: int, limits: Sequence[int]) -> Iterator[Turn]:
    """Every prompt once, in an order in which every common beginning of whole chunks is read once.

    Where prompts part, the smallest group comes first and the largest last: its cache is not copied but goes on, so of
    ``n`` prompts at most ``1 + log2(n)`` caches are held beside the one in use.

    Args:
        limits: `max_shared_prefix` of each prompt.
    """
    stack: list[tuple[list[int], int, tuple[int, ...]]] = [(list(range(len(prompts))), 0, ())]
    while stack:
        members, at, held = stack.pop()  # prompts that agree in their first `at` tokens; `held` is for others
        if len(members) < 2:
            yield from ((one, held) for one in members)
            continue
        while len(groups := _by_next_chunk(prompts, members, chunk, limits, at)) == 1:
            at += chunk
        here = (*held, at) if at else held
        for i, group in reversed(list(enumerate(groups, 1))):
            stack.append((group, at + chunk, held if i == len(groups) and len(group) > 1 else here))


def _by_next_chunk(
    prompts: Sequence[array[int]], members: list[int], chunk: int, limits: Sequence[int], at: int
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
    """First tokens of the prompt that it has read, for other prompts too."""
    seconds: float = 0.0
    """Seconds in which the cache has read what it holds."""


class PrefixCache:
    """The caches of common beginnings, of one policy and budget.

    Args:
        fresh: makes an empty cache for a prompt of so many tokens.
        longest: tokens of the longest prompt; full attention's caches get room for it, so that none has to grow.
    """

    def __init__(self, model: PreTrainedModel, fresh: Callable[[int], BoundedCache], longest: int) -> None:
        self._model, self._fresh, self._longest = model, fresh, longest
        self.drop()

    def drop(self) -> None:
        """Forget all caches; a later turn reads again what it needs."""
        self._ids: array[int] = array("i")
        self._held: list[Start] = []

    def start(self, ids: array[int], held: Sequence[int], pins: Sequence[tuple[int, int]] = ()) -> Start:
        """The cache that a turn's prompt goes on from: a fork, or an empty cache where nothing is shared or a fork would not
        equal a fresh run (budgets or frequencies that depend on the prompt's length). ``pins``: the prompt's, see
        `BoundedCache.pin`; prompts that begin alike have the same ones there."""
        found = [one for one in self._held if self._ids[: one.shared] == ids[: one.shared]]
        self._ids, self._held = ids, found
        try:
            for length in held:
                self._hold(ids, length, held, pins)
            found[:] = [one for one in found if one.shared in held]
            if held:
                last = max(found, key=lambda one: one.shared)
                return Start(_pinned(last.cache.fork(len(ids)), pins), last.shared, last.seconds)
        except CannotFork:
            self.drop()
        return Start(_pinned(self._fresh(len(ids)), pins))

    def _hold(self, ids: array[int], length: int, wanted: Sequence[int], pins: Sequence[tuple[int, int]]) -> None:
        """Hold a cache of the first ``length`` tokens: the longest one that is held goes on, or a copy where it is wanted
        as it is."""
        shorter = [one for one in self._held if one.shared <= length]
        base = max(shorter, key=lambda one: one.shared) if shorter else Start(self._fresh(self._longest))
        if shorter and base.shared == length:
            return
        cache = base.cache
        if base.shared and base.shared in wanted:
            cache = cache.fork(self._longest)
        elif shorter:
            self._held.remove(base)
        began = time.perf_counter()
        _pinned(cache, [(start, min(end, length)) for start, end in pins if start < length])
        with attach(self._model):
            prefill(self._model, ids[:length], cache)
        self._held.append(Start(cache, length, base.seconds + time.perf_counter() - began))


def _pinned(cache: BoundedCache, pins: Sequence[tuple[int, int]]) -> BoundedCache:
    """The cache, with pins."""
    for pin in pins:
        cache.pin(*pin)
    return cache
