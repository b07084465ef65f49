"""A document that prompts begin with: it is read once for all of them, one after the other.

Its cache is forked for every prompt (`BoundedCache.fork`). That equals a fresh run bit for bit where the beginning ends at a
multiple of ``chunk`` before both prompts' held-back tails; no other is shared.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from transformers import PreTrainedModel

from ...documents.prefix_cache import PrefixCache
from ...engine import BoundedCache, prefill


def shared_lengths(prompts: Sequence[array[int]], cache: BoundedCache) -> list[int]:
    """First tokens of each prompt that are read for a neighbour too, in such a cache: whole chunks, the last of them before the
    eviction that precedes either tail. They only grow, so that no cache is needed that ends before the one that is held."""
    beside = [_common(a, b, cache) for a, b in pairwise(prompts)]
    grown = [*accumulate(reversed(beside), min)][::-1]
    return [*grown, *grown[-1:]] if grown else [0] * len(prompts)


def _common(a: array[int], b: array[int], cache: BoundedCache) -> int:
    schedule = cache.schedule
    end = 0 if schedule.one_shot else schedule.safe(min(len(a), len(b)) - 1)
    while a[:end] != b[:end]:
        end -= schedule.chunk
    return end


class SharedBeginning:
    """The cache of the prefix that prompts share, for one policy and budget.

    Args:
        make_cache: makes an empty cache for a prompt of n tokens.
        longest: tokens of the longest prompt. Full attention's cache is allocated for it, so it never grows.
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[int], BoundedCache], longest: int) -> None:
        self._model, self._make_cache, self._longest = model, make_cache, longest
        self.drop()

    def drop(self) -> None:
        """Forget the cache; the next prompt that shares a prefix reads it again."""
        self._prefix = PrefixCache(self._make_cache)
        self.seconds = 0.0
        """Seconds spent reading the tokens in the cache."""

    def fork(self, ids: array[int], shared: int, pins: Sequence[tuple[int, int]] = ()) -> BoundedCache:
        """A cache for the next prompt: a copy after its first ``shared`` tokens. The cache is empty if nothing is
        shared, or if a copy would differ from a fresh run (budgets or frequencies that depend on the prompt's length).

        Args:
            shared: see `shared_lengths`.
            pins: the prompt's, see `BoundedCache.pin`. Prompts that share a prefix have the same pins in it.
        """
        if shared and self._prefix.tokens < shared:
            began = time.perf_counter()
            read = self._make_cache(self._longest) if self._prefix.cache is None else self._prefix.cache
            self._prefix.cache = read
            read.pin_all((start, min(end, shared)) for start, end in pins if start < shared)
            prefill(self._model, ids[:shared], read)
            self.seconds += time.perf_counter() - began
        cache = self._prefix.fork(len(ids)) if shared else self._make_cache(len(ids))
        cache.pin_all(pins)
        return cache
