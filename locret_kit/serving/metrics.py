"""Figures of the engine, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import Engine

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


class Collected(Collector):
    """Figures that Prometheus collects."""

    def __init__(self, engine: Engine, documents: int) -> None:
        self.engine, self.documents = engine, documents

    def collect(self) -> Iterator[Metric]:
        """All figures now."""
        engine, store = self.engine, self.engine.store
        disk = (0, 0) if store is None else (store.bytes, int(store.failing is not None))
        now = [engine.running, engine.waiting, engine.sessions, engine.caches, engine.idle, self.documents]
        now += [engine.prefixes, *disk]
        for (name, says), value in zip(GAUGES.items(), now, strict=True):
            yield GaugeMetricFamily(f"locret_{name}", says, value)
        files = {} if store is None else {"saved_files": store.written, "save_failures": store.failures}
        counts = vars(engine.counters) | files
        for name, says in COUNTERS.items():
            yield CounterMetricFamily(f"locret_{name}", says, counts.get(name, 0))
        for times in ("queue_s", "first_token_s", "token_s"):
            yield from counts[times].collect()


def metrics_of(engine: Engine, documents: int) -> str:
    """All figures now, as text."""
    registry = CollectorRegistry()
    registry.register(Collected(engine, documents))
    return generate_latest(registry).decode()
