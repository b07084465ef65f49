"""A document: what prompts have in common at their beginning, read once for all of them, one after the other.

Its cache is forked for every prompt (`BoundedCache.fork`). That equals a fresh run bit for bit where the
beginning ends at a multiple of ``chunk`` before both prompts' held-back tails; no other is shared.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from ...backbones.intercept import attach
from ...cache.bounded import BoundedCache, CannotFork
from ...cache.geometry.schedule import Schedule
from ...runtime.session import prefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shared_lengths(prompts: Sequence[array[int]], schedule: Schedule) -> list[int]:
    """First tokens of each prompt that are read for a neighbour too: whole chunks, the last of them before the eviction that
    precedes either tail. They only grow, so that no cache is needed that ends before the one that is held."""
    beside = [_common(a, b, schedule) for a, b in pairwise(prompts)]
    grown = [*accumulate(reversed(beside), min)][::-1]
    return [*grown, *grown[-1:]] if grown else [0] * len(prompts)


def _common(a: array[int], b: array[int], schedule: Schedule) -> int:
    end = 0 if schedule.one_shot else schedule.safe(min(len(a), len(b)) - 1)
    while a[:end] != b[:end]:
        end -= schedule.chunk
    return end


class SharedBeginning:
    """The cache of what prompts have in common, of one policy and budget.

    Args:
        fresh: makes an empty cache for a prompt of so many tokens.
        longest: tokens of the longest prompt; full attention's cache gets room for it, so that it need not grow.
    """

    def __init__(self, model: PreTrainedModel, fresh: Callable[[int], BoundedCache], longest: int) -> None:
        self._model, self._fresh, self._longest = model, fresh, longest
        self.drop()

    def drop(self) -> None:
        """Forget the cache; the next prompt that shares a beginning reads it again."""
        self._cache: BoundedCache | None = None
        self.seconds = 0.0
        """Seconds in which the cache has read what it holds."""

    def fork(self, ids: array[int], shared: int, pins: Sequence[tuple[int, int]] = ()) -> BoundedCache:
        """The cache that the next prompt goes on from: a copy behind its first ``shared`` tokens; or an empty one, where that
        is none or a copy would not equal a fresh run (budgets or frequencies that depend on the prompt's length).

        Args:
            shared: see `shared_lengths`.
            pins: the prompt's, see `BoundedCache.pin`; prompts that begin alike have the same ones there.
        """
        try:
            if shared:
                return _pinned(self._read(ids, shared, pins).fork(len(ids)), pins)
        except CannotFork:
            self.drop()
        return _pinned(self._fresh(len(ids)), pins)

    def _read(self, ids: array[int], shared: int, pins: Sequence[tuple[int, int]]) -> BoundedCache:
        """Read the first ``shared`` tokens, as far as they are not read yet."""
        if self._cache is None:
            self._cache = self._fresh(self._longest)
        if self._cache.get_seq_length() < shared:
            began = time.perf_counter()
            _pinned(self._cache, [(start, min(end, shared)) for start, end in pins if start < shared])
            with attach(self._model):
                prefill(self._model, ids[:shared], self._cache)
            self.seconds += time.perf_counter() - began
        return self._cache


def _pinned(cache: BoundedCache, pins: Sequence[tuple[int, int]]) -> BoundedCache:
    """The cache, with pins."""
    for pin in pins:
        cache.pin(*pin)
    return cache
