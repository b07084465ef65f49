"""Counters of a running engine, for ``/metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import Histogram

from ..runtime.sequence import Sequence
from .request import LOG, ServerRequest

BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Bounds of the histograms, in seconds."""


def seconds(name: str, says: str) -> Histogram:
    """An empty histogram of times."""
    return Histogram(f"locret_{name}_seconds", says, buckets=BUCKETS, registry=None)


@dataclass
class Counters:
    """Counters since the start, for ``/metrics``."""

    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    evictions: int = 0
    forwards: int = 0
    queue_s: Histogram = field(default_factory=lambda: seconds("queue", "From a request to its admission"))
    first_token_s: Histogram = field(
        default_factory=lambda: seconds("first_token", "From a request's admission to its first token")
    )
    token_s: Histogram = field(default_factory=lambda: seconds("token", "Per token after the first, of each request"))

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
        self.requests += 1
        self.cancelled += sequence.finish_reason == "cancelled"
        self.failed += sequence.finish_reason == "error"
        self.prompt_tokens += len(request.ids)
        self.cached_tokens += request.cached_tokens
        self.new_tokens += len(sequence.tokens)
        if sequence.first_token_s is not None and sequence.ended_s is not None:
            self.first_token_s.observe(sequence.first_token_s)
            if len(sequence.tokens) > 1:
                self.token_s.observe((sequence.ended_s - sequence.first_token_s) / (len(sequence.tokens) - 1))
