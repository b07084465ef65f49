"""A request on its way through the engine, what caches have read of its prompt, why the engine may refuse it; and figures of
requests, in Prometheus' text format.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from itertools import dropwhile
from types import SimpleNamespace
from typing import Any, Literal

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..documents.document import Document
from ..documents.document_text import hash_ids
from ..engine import BoundedCache, Request, Sequence
from ..policies import Policy
from ..settings import RunSettings

LOG = logging.getLogger("locret_kit.serving")


@dataclass(frozen=True)
class PrefixKey:
    """A session and the tokens that it has read."""

    name: str
    owner: str
    document_id: str
    """The document that the session continues; '' for none."""
    tokens: int
    sha256: str
    """Hash of the token ids, see ``documents.document_text``."""
    hidden: int = 0
    """Tokens of thoughts that it has read in addition. Chat templates omit them from later prompts."""

    @classmethod
    def from_record(cls, name: str, owner: str, record: dict[str, Any]) -> tuple[PrefixKey, ...]:
        """The keys that a session's file holds. Raises ValueError."""
        document, keys = record.get("about"), record.get("keys", [[record.get("tokens"), record.get("sha256"), 0]])
        with suppress(TypeError):
            made = tuple(cls(name, owner, document, *key) for key in keys if isinstance(document, str))
            if made and all((type(one.tokens), type(one.sha256), type(one.hidden)) == (int, str, int) for one in made):
                return made
        raise ValueError(f"{name} is no session")

    @classmethod
    def record(cls, keys: tuple[PrefixKey, ...]) -> dict[str, object]:
        """Record of the keys in a session's file."""
        return {"about": keys[0].document_id, "keys": [[key.tokens, key.sha256, key.hidden] for key in keys]}


class PrefixHashes:
    """Hashes of a prompt's prefixes, each computed once."""

    def __init__(self, ids: array[int]) -> None:
        self._ids, self.hash = ids, cache(lambda tokens: hash_ids(ids[:tokens]))
        """The hash of the first ``tokens`` ids."""

    def longest(self, keys: Iterable[PrefixKey], owner: str, document_id: str) -> PrefixKey | None:
        """The longest key of an owner's caches about a document, with tokens that are a proper prefix of the prompt."""
        mine = (key for key in keys if key.owner == owner and key.document_id == document_id)
        shorter = sorted((key for key in mine if key.tokens < len(self._ids)), key=lambda key: -key.tokens)
        return next((key for key in shorter if self.hash(key.tokens) == key.sha256), None)


class Stopping(RuntimeError):
    """The engine is stopping: it takes no requests, and running ones are cancelled."""


class Busy(Exception):
    """The queue is full. ``retry_after``: seconds until another try makes sense."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait already")
        self.retry_after = max(1, waiting)


@dataclass(eq=False)
class ServerRequest(Request):
    """One prompt from the body to the answer.

    Attributes:
        owner: whose caches it may continue.
        purpose: an answer for a client, a document to read, or a shared prefix to read.
        document, document_id: the document that the prompt continues, and its id. The engine releases the document when the
            request has its own copy.
        settings, policy: of its own; None for the server's.
        shared_tokens: number of tokens that other prompts may share.
        later: ids up to its answer, as the next turn's prompt has them. drops: whether the cache for that turn has read only
            tokens that both prompts have.
        thought_spans: half-open spans of the answer's tokens that are thoughts, so far.
        kept: the cache that will wait, if it is not the answer's own.
        hidden: number of placeholder tokens at the start of ``ids``, for thoughts that the cache has read and the prompt omits.
        parks: whether the cache may wait for a next turn.
        on_change: called by the engine's thread after every token and at the end; must not block.
        stop_at: called by the engine's thread after every token. If it returns a number, the answer ends with that many tokens.
        sequence: the batch's record of it; None while it waits.
        cache: given with the request, read from a file, or made on admission; None again at the end.
        session: name of the session that it continues; '' for a new one.
        cancelled: whether it is to end; the engine's thread ends it.
        loading: whether its session is being read from its file. The session's cache counts already.
        file, store_version: the session's file, and the store's version at the time of the lookup.
        loads: number of times that a session was read from its file for it.
        prefix_read: tokens of a shared prefix that was read because of this request.
        evictions, kept_rows: of its cache, after the newest token.
        submitted: its arrival, in seconds of ``time.perf_counter``.
    """

    ids: array[int]
    _: KW_ONLY
    owner: str
    purpose: Literal["answer", "document", "prefix"] = "answer"
    document: Document | None = None
    document_id: str = ""
    settings: RunSettings | None = None
    policy: Policy | None = None
    shared_tokens: int = 0
    later: array[int] = field(default_factory=lambda: array("i"))
    drops: bool = False
    thought_spans: Callable[[], list[tuple[int, int]]] = field(default=list)
    kept: BoundedCache | None = None
    hidden: int = 0
    parks: bool = True
    on_change: Callable[[], None] = field(default=lambda: None)
    stop_at: Callable[[list[int]], int | None] | None = None
    sequence: Sequence | None = None
    cache: BoundedCache | None = None
    session: str = ""
    cancelled: bool = False
    loading: bool = False
    file: PrefixKey | None = None
    store_version: int | None = None
    loads: int = 0
    prefix_read: int = 0
    evictions: int = 0
    kept_rows: int = 0
    submitted: float = field(default_factory=time.perf_counter)

    @cached_property
    def prefixes(self) -> PrefixHashes:
        """Hashes of the prompt's prefixes."""
        return PrefixHashes(self.ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as it was sent."""
        return len(self.ids) - self.hidden

    @property
    def max_tokens(self) -> int:
        """Tokens of the answer and its thought, at most."""
        apart = self.thought.max_tokens if self.thought is not None and self.thought.apart else 0
        return self.max_new_tokens + (apart or 0)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        return max(0, self.sequence.prompt_read - self.prefix_read - self.hidden) if self.sequence is not None else 0

    def read(self, tokens: int, blank: Callable[[int], bool]) -> Iterator[tuple[array[int], int]]:
        """Prompt prefixes that may continue a cache with ``tokens`` read tokens, each with the number of thought tokens that
        it omits. The first is the prompt with its answer. The second is its form in the next turn's prompt, without leading
        ``blank`` tokens of the answer."""
        assert self.sequence is not None
        answer = self.sequence.tokens[: max(0, tokens - len(self.ids))]
        yield (self.ids + array("i", answer))[self.hidden : tokens], self.hidden
        if answer and self.later:
            answer = answer[max((end for _, end in self.thought_spans()), default=0) :]
            answer = [*dropwhile(blank, answer)]
            same = (size for size in range(len(answer), 0, -1) if self.later[-size:].tolist() == answer[:size])
            shorter = self.later + array("i", answer[next(same, 0) :])
            if answer and tokens >= len(shorter):  # after a thought alone the same prompt again would continue it
                yield shorter, tokens - len(shorter)

    @property
    def has_defaults(self) -> bool:
        """Whether it runs as the server is set, so that its cache fits other requests."""
        return self.settings is None and self.policy is None and not self.prompt_logprobs


# ---- figures of a running engine, in Prometheus' text format ---------------------------------------------------------


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
            times = Histogram(f"locret_{name}_seconds", says, buckets=BUCKETS, registry=None)
            setattr(self, f"{name}_s", times)

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
        self.prompt_tokens += request.prompt_tokens
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
