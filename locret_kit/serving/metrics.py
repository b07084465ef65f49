"""Figures of the engine in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .engine import Engine

GAUGES = {
    "locret_requests_running": "Requests that have a cache",
    "locret_requests_waiting": "Requests that wait for a cache",
    "locret_sessions": "Caches at once, at most",
    "locret_sessions_idle": "Caches that wait for a next turn",
    "locret_documents": "Documents in memory",
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


def metrics_of(engine: Engine, documents: int) -> str:
    """All figures now."""
    registry = CollectorRegistry()
    now = [engine.running, engine.waiting, engine.sessions, engine.idle, documents]
    for (name, says), value in zip(GAUGES.items(), now, strict=True):
        Gauge(name, says, registry=registry).set(value)
    for name, says in COUNTERS.items():
        Counter(f"locret_{name}", says, registry=registry).inc(getattr(engine.figures, name))
    return generate_latest(registry).decode()
