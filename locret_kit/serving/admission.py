"""Admission of requests, each with its cache: a session's cache from memory or from a file, a copy of a document's cache or of
a shared prefix, or an empty one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..documents.prefix_cache import PrefixCache
from ..engine import BoundedCache, CannotFork, Engine, Sequence
from .figures import Counters
from .request import Prompt, ServerRequest
from .sessions import ParkedSession, Sessions

MIN_PREFIX = 32
"""Tokens of a shared prefix, at least: fewer are read as quickly as they are copied."""


@dataclass(eq=False)
class SharedPrefix(PrefixCache):
    """A prefix that prompts share. It has no cache while it is read, and where it could not be."""

    reading: bool = True


class Admission:
    """The queue of requests. Its methods are called with the engine's lock held.

    Args:
        engine: runs the admitted requests.
        sessions: caches that wait for a next turn; their ``spec`` makes new ones.
        max_caches: sessions' caches at once, waiting and running. max_prefixes: shared prefixes in memory at once.
    Attributes:
        queue: waiting requests, in order of arrival. active: admitted requests that have not ended.
        prefixes: shared prefixes in memory, including those that are being read.
    """

    def __init__(
        self, engine: Engine, sessions: Sessions, counters: Counters, *, max_caches: int, max_prefixes: int
    ) -> None:
        self._engine, self._sessions, self._spec, self.counters = engine, sessions, sessions.spec, counters
        self.max_caches, self.max_prefixes = max_caches, max_prefixes
        self.queue: list[ServerRequest] = []
        self.active: list[ServerRequest] = []
        self.prefixes: OrderedDict[tuple[str, str], SharedPrefix] = OrderedDict()

    @property
    def caches(self) -> int:
        """Caches of sessions that exist now, or that are being read from their files."""
        waiting = (request for request in self.queue if request.purpose == "answer")
        loaded = sum(request.lookup.loading or request.cache is not None for request in waiting)
        return len(self._sessions.parked) + loaded + sum(request.purpose == "answer" for request in self.active)

    def admit(self) -> list[ServerRequest]:
        """Admit waiting requests, in order of arrival, if it is their turn and a cache is free. Returns the requests that ended
        instead, cancelled or with an error."""
        ended = []
        for request in [one for one in self.queue if not one.lookup.loading]:
            try:
                if not request.cancelled:
                    self._admit_one(request)
                    continue
                self.leave(request, "cancelled")
            except Exception as error:  # of one request, which ends alone
                self.leave(request, "error", error)
            ended.append(request)
        return ended

    def leave(self, request: ServerRequest, reason: str, error: Exception | None = None) -> None:
        """End a request that has not entered."""
        self.queue.remove(request)
        request.sequence = Sequence(request.for_engine())
        request.sequence.end(reason, error)

    def _admit_one(self, request: ServerRequest) -> None:
        """Admit a request, or start to read its session from its file. It keeps waiting if neither is possible yet."""
        lookup, sessions = request.lookup, self._sessions
        if request.cache is not None:  # a document's, or a session's from its file
            self._resume(request, request.cache, lookup.skipped)
            return
        if request.spec.is_default and not request.drops_thoughts and (twin := sessions.twin(request)) is not None:
            self._repeat(request, twin)
            return
        key = sessions.find(request) if request.spec.is_default else None
        parked = None if key is None else sessions.parked.get(key.name)
        if key is None:
            self._begin(request)
        elif parked is not None and key in parked.keys:
            if not parked.saving and self._resume(request, parked.cache, key.skipped):
                lookup.name = key.name
                del sessions.parked[parked.name]
        elif self._room():
            taken = {one.lookup.name for one in (*self.active, *self.queue)} | {*sessions.parked}
            # A branch of a conversation that went on gets a file of its own.
            lookup.name = "" if key.name in taken else key.name
            sessions.load(request, key)

    def _repeat(self, request: ServerRequest, twin: ParkedSession) -> None:
        """Admit a request with a copy of the cache that an equal prompt was read into, where there is room."""
        self._sessions.parked.move_to_end(twin.name)
        if not (self._engine.takes(1) and self._room()):
            return
        cache = twin.cache
        if twin.name in self._sessions.parked:  # its conversation may go on
            cache = cache.with_budget(cache.schedule.budget)
        cache.take_back(cache.get_seq_length() - len(request.prompt.ids) + 1)
        self._resume(request, cache, 0)

    def _resume(self, request: ServerRequest, cache: BoundedCache, skipped: int) -> bool:
        """Admit a request with a cache that has read its prefix and ``skipped`` tokens of thoughts. If the thoughts are dropped,
        the request gets a copy, otherwise the cache itself."""

        def resumed() -> BoundedCache:
            if not request.drops_thoughts:
                request.cache, request.document = cache, None
                return cache
            try:
                request.cache, request.next_cache, request.document = cache.fork(request.prompt_length), cache, None
                return request.cache
            except CannotFork:  # a shorter prompt, or an answer that was read with its thought
                assert request.sequence is not None
                request.sequence.request.ids, request.lookup.skipped = request.prompt.ids, 0
                return self._make_cache(request, None)

        return self._enter(request, resumed, cache.get_seq_length() - skipped, skipped)

    def _begin(self, request: ServerRequest) -> None:
        """Start a request with a document's cache, a shared prefix's cache, or an empty one."""
        prefix, ids = None, request.prompt.ids
        tokens = min(request.prompt.shared_tokens, len(ids) - 1) - self._tail
        if self.max_prefixes and request.spec.is_default and tokens >= MIN_PREFIX:
            key = request.owner, request.prompt.hash(tokens)
            prefix = self.prefixes.get(key)
            if prefix is not None:
                self.prefixes.move_to_end(key)
            elif len(self.prefixes) < self.max_prefixes or not all(one.reading for one in self.prefixes.values()):
                if not self._engine.takes(tokens):
                    return
                prefix = self._read_prefix(request, key, tokens)
        if prefix is not None and prefix.reading:
            return
        seen = request.document.cache.get_seq_length() if request.document is not None else 0
        seen = seen if prefix is None else prefix.tokens
        if self._engine.takes(len(ids) - seen) and self._room():
            self._enter(request, partial(self._make_cache, request, prefix), seen)

    def _read_prefix(self, request: ServerRequest, key: tuple[str, str], tokens: int) -> SharedPrefix:
        """Start to read a shared prefix, in place of the least recently used one. Where that raises, nobody waits for it."""
        cache = self._spec.cache(tokens + self._tail + 1)
        if len(self.prefixes) >= self.max_prefixes:
            oldest = next(one for one, prefix in self.prefixes.items() if not prefix.reading)
            self.prefixes.pop(oldest).cache = None  # answers that came from it hold it too
        prefix = SharedPrefix(self._spec.cache)

        def read() -> None:
            if reader.sequence is not None and reader.sequence.finish_reason is not None:
                prefix.reading = False
                prefix.cache = cache if reader.sequence.finish_reason == "read" else None

        reader = ServerRequest(
            Prompt(request.prompt.ids[:tokens]), owner=request.owner, purpose="prefix", on_change=read, cache=cache
        )
        self._enter(reader, lambda: cache, 0)
        request.prefix_read, self.prefixes[key] = tokens, prefix
        return prefix

    @property
    def _tail(self) -> int:
        """Tokens at a prompt's end, after its last eviction. A shared prefix ends before them."""
        return self._spec.settings.local_len or 0

    def _make_cache(self, request: ServerRequest, prefix: SharedPrefix | None) -> BoundedCache:
        """A cache of its own, that has read a document, a shared prefix, or nothing."""
        tokens = len(request.prompt.ids)
        if request.document is not None:
            document, request.document = request.document, None
            if request.spec.evidence and document.has_text:
                request.search = document.search(request.prompt.ids)
            request.cache = document.fork_for(tokens, evidence=request.spec.evidence)
        elif prefix is not None:
            request.cache = prefix.fork(tokens)
        else:
            request.cache = self._spec.cache(tokens, request.spec.settings, request.spec.policy)
        return request.cache

    def _enter(
        self, request: ServerRequest, make_cache: Callable[[], BoundedCache], seen: int, skipped: int = 0
    ) -> bool:
        """Admit a request, if it is its turn. Its cache has seen ``seen`` of its tokens and ``skipped`` others. Raises ValueError
        as ``Engine.add``."""
        background = request.purpose == "document"
        if not self._engine.takes(len(request.prompt.ids) - seen, background=background):
            return False
        request.lookup.skipped, seen = skipped, seen + skipped
        request.sequence = self._engine.add(request.for_engine(), make_cache, seen=seen, background=background)
        self.queue = [one for one in self.queue if one is not request]
        self.active.append(request)
        if request.purpose == "answer":
            self.counters.queue_s.observe(request.sequence.began - request.submitted)
        return True

    def _room(self) -> bool:
        """Whether a cache may be made; the waiting one that was used least recently goes for it, when its file is written."""
        parked = self._sessions.parked
        while self.caches >= self.max_caches:
            if (oldest := next((one for one in parked.values() if one.settled), None)) is None:
                return False
            del parked[oldest.name]
        return True
