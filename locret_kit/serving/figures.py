"""Figures of a running engine, in Prometheus' text format."""

import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Sequence
from .request import LOG, ServerRequest

GAUGES = {
    "requests_running": "Requests that have a cache",
    "requests_waiting": "Requests that wait for a cache",
    "sessions": "Caches at once, at most",
    "sessions_in_use": "Caches that exist now, those that wait for a next turn included",
    "sessions_idle": "Caches that wait for a next turn",
    "documents": "Documents in memory",
    "beginnings": "Equal beginnings of prompts in memory",
    "session_disk_bytes": "Bytes of the files of sessions and documents",
    "session_disk_failing": "1 where the last file could not be written, 0 where it was",
}
COUNTERS = {
    "requests": "Requests that ended",
    "cancelled": "Requests that were cancelled",
    "failed": "Requests that failed",
    "refused": "Requests that were refused because the queue was full",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were not read again",
    "new_tokens": "Tokens of answers",
    "evictions": "Evictions",
    "forwards": "Forwards of the model",
    "saved_files": "Files of sessions and documents that were written",
    "save_failures": "Files of sessions and documents that could not be written",
}
TIMES = {
    "queue": "From a request to its admission",
    "first_token": "From a request's admission to its first token",
    "token": "Per token after the first, of each request",
}
"""Histograms of seconds."""
BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Bounds of the histograms, in seconds."""


class Counters(SimpleNamespace):
    """Counts since the start, by the names of ``COUNTERS``, and times, by those of ``TIMES`` with an ``_s``."""

    def __init__(self) -> None:
        super().__init__(**dict.fromkeys(COUNTERS, 0))
        for name, says in TIMES.items():
            setattr(self, f"{name}_s", Histogram(f"locret_{name}_seconds", says, buckets=BUCKETS, registry=None))

    def count(self, request: ServerRequest, sequence: Sequence) -> None:
        """A request that has ended."""
        if sequence.error is not None and not isinstance(sequence.error, ValueError):
            LOG.error("a request failed", exc_info=sequence.error)
        if sequence.error is not None:
            sequence.error.__traceback__ = None  # its frames hold the cache
        # A cache that goes on, or that is a copy, counts what was evicted of it before.
        self.evictions += max(0, request.evictions - sequence.evictions_before)
        if request.purpose == "prefix":
            return
        if request.purpose == "answer":
            LOG.info(
                "answer: %d tokens of prompt (%d cached), %d written, %.2fs, end: %s", len(request.prompt.ids),
                request.cached_tokens, len(sequence.written), time.perf_counter() - request.submitted, sequence.finish_reason,
            )  # fmt: skip
        self.requests += 1
        self.cancelled += sequence.finish_reason == "cancelled"
        self.failed += sequence.finish_reason == "error"
        self.prompt_tokens += len(request.prompt.ids)
        self.cached_tokens += request.cached_tokens
        self.new_tokens += len(sequence.written)
        if sequence.first_token_s is not None and sequence.ended_s is not None:
            self.first_token_s.observe(sequence.first_token_s)
            if len(sequence.written) > 1:
                self.token_s.observe((sequence.ended_s - sequence.first_token_s) / (len(sequence.written) - 1))


class Figures(Collector):
    """Figures that Prometheus collects.

    Args:
        now: those of ``GAUGES``, and of ``COUNTERS`` that are counted elsewhere; 0 where one is missing.
    """

    def __init__(self, counters: Counters, now: Mapping[str, float]) -> None:
        self.values = {**counters.__dict__, **now}

    def collect(self) -> Iterator[Metric]:
        """All figures."""
        for kind, names in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, says in names.items():
                yield kind(f"locret_{name}", says, self.values.get(name, 0))
        for name in TIMES:
            yield from self.values[f"{name}_s"].collect()
