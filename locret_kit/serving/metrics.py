"""Figures of the engine in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import Engine

GAUGES = {
    "locret_requests_running": "Requests that have a cache",
    "locret_requests_waiting": "Requests that wait for a cache",
    "locret_sessions": "Caches at once, at most",
    "locret_sessions_in_use": "Caches that exist now, those that wait for a next turn included",
    "locret_sessions_idle": "Caches that wait for a next turn",
    "locret_documents": "Documents in memory",
    "locret_beginnings": "Equal beginnings of prompts in memory",
    "locret_session_disk_bytes": "Bytes of the files of sessions and documents",
    "locret_session_disk_failing": "1 where the last file could not be written, 0 where it was",
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
}


class Collected(Collector):
    """Figures that Prometheus collects."""

    def __init__(self, engine: Engine, documents: int) -> None:
        self.engine, self.documents = engine, documents

    def collect(self) -> Iterator[Metric]:
        """All figures now."""
        engine, counters = self.engine, self.engine.counters
        now = [engine.running, engine.waiting, engine.sessions, engine.caches, engine.idle, self.documents]
        now.append(engine.prefixes)
        store = engine.store
        now += [0, 0] if store is None else [store.bytes, int(store.failing is not None)]
        for (name, says), value in zip(GAUGES.items(), now, strict=True):
            yield GaugeMetricFamily(name, says, value)
        for name, says in COUNTERS.items():
            yield CounterMetricFamily(f"locret_{name}", says, getattr(counters, name))
        written, failures = (0, 0) if store is None else (store.written, store.failures)
        says = "Files of sessions and documents that"
        yield CounterMetricFamily("locret_saved_files", f"{says} were written", written)
        yield CounterMetricFamily("locret_save_failures", f"{says} could not be written", failures)
        yield from (*counters.queue_s.collect(), *counters.first_token_s.collect(), *counters.token_s.collect())


def metrics_of(engine: Engine, documents: int) -> str:
    """All figures now, as text."""
    registry = CollectorRegistry()
    registry.register(Collected(engine, documents))
    return generate_latest(registry).decode()
