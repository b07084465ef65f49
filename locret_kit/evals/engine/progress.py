"""Progress lines with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from .rows import Row


class Progress:
    """One line an example. Time left is extrapolated from seconds a prompt token so far.

    Args:
        examples: how many are to be answered.
        tokens: of their prompts together, shared beginnings in each.
    """

    def __init__(self, examples: int, tokens: int, say: Callable[[str], None]) -> None:
        self._examples, self._tokens, self._say = examples, tokens, say
        self._began, self._done, self._read = time.monotonic(), 0, 0
        say(f"{examples} examples to answer, {tokens} prompt tokens" if examples else "nothing is missing")

    def report(self, row: Row) -> None:
        """A finished example."""
        self._done += 1
        self._read += row.length
        result = f"error: {row.error}" if row.error else f"{row.metric} {row.score:.3f}"
        budget = f" budget {row.budget}" if row.budget else ""
        left = (time.monotonic() - self._began) / self._read * max(0, self._tokens - self._read)
        self._say(
            f"[{self._done}/{self._examples}] {row.task} {row.haystack} {row.length} #{row.sample} {row.label}{budget}: "
            f"{result} ({row.prefill_s + row.decode_s:.1f} s), {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
