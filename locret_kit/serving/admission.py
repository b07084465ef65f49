"""Admission of requests, each with its cache: one that waits for the next turn, in memory or in a file, a copy of one that has
read a document or a prefix that prompts share, or an empty one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..cache.bounded import BoundedCache, CannotFork
from ..runtime.engine import Engine as Batch
from ..runtime.engine import Sequence
from ..runtime.sequence import PromptScheduler
from .metrics import Counters
from .request import ServerRequest
from .sessions import Sessions
from .store import SessionSpec

MIN_PREFIX = 32
"""Tokens of a shared prefix, at least: fewer are read as quickly as they are copied."""


@dataclass(eq=False)
class SharedPrefix:
    """A prefix that prompts share. ``cache`` is None while it is read, and where it could not be."""

    tokens: int
    cache: BoundedCache | None = None
    reading: bool = True


class Admission:
    """The queue of requests. Its methods are called with the engine's lock held.

    Args:
        batch: where requests enter. scheduler: whose prompt is read next.
        sessions: caches that wait for a next turn. spec: what a session is.
        max_caches: sessions' caches at once, waiting and running. max_prefixes: shared prefixes in memory at once.
    Attributes:
        queue: requests that wait, in the order in which they came. active: those that have entered and not ended.
        prefixes: shared prefixes in memory, those that are being read included.
    """

    def __init__(
        self, batch: Batch, scheduler: PromptScheduler[Sequence], sessions: Sessions, spec: SessionSpec, counters: Counters, *,
        max_caches: int, max_prefixes: int,
    ) -> None:  # fmt: skip
        self._batch, self._scheduler, self._sessions, self._spec = batch, scheduler, sessions, spec
        self.counters = counters
        self.max_caches, self.max_prefixes = max_caches, max_prefixes
        self.queue: list[ServerRequest] = []
        self.active: list[ServerRequest] = []
        self.prefixes: OrderedDict[tuple[str, str], SharedPrefix] = OrderedDict()

    @property
    def caches(self) -> int:
        """Caches of sessions that exist now, or that are being read from their files."""
        waiting = (request for request in self.queue if request.purpose == "answer")
        loaded = sum(request.loading or request.cache is not None for request in waiting)
        return len(self._sessions) + loaded + sum(request.purpose == "answer" for request in self.active)

    def admit(self) -> list[ServerRequest]:
        """Let those that wait enter, in the order in which they came, where it is their turn and there is a cache; those that
        have ended instead, cancelled or with an error."""
        ended = []
        for request in list(self.queue):
            if request.loading:
                continue
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
        request.sequence = Sequence(request)
        request.sequence.end(reason, error)

    def _admit_one(self, request: ServerRequest) -> None:
        """Let a request enter, or begin to read its session from its file; it goes on waiting where neither can be yet."""
        if request.cache is not None:  # a document's, or a session's from its file
            self._enter(request, existing(request.cache), request.cache.get_seq_length())
            return
        parked, file = self._sessions.find(request), self._sessions.find_file(request)
        seen = parked.key.tokens if parked is not None else 0
        if file is not None and file.tokens > seen:
            if self._room():
                taken = file.name in self._sessions or file.name in {one.session for one in (*self.active, *self.queue)}
                # A branch of a conversation that went on gets a file of its own.
                request.session = "" if taken else file.name
                self._sessions.load(request, file)
        elif parked is None:
            self._begin(request)
        elif not parked.saving and self._enter(request, existing(parked.cache), seen):
            request.cache, request.session, request.document = parked.cache, parked.key.name, None
            self._sessions.take(parked)

    def _begin(self, request: ServerRequest) -> None:
        """Let a request begin: with a document's cache, that of a shared prefix, or an empty one."""
        prefix = None
        if tokens := self._shared_tokens(request):
            key = request.owner, request.prefixes.hash(tokens)
            prefix = self.prefixes.get(key)
            if prefix is not None:
                self.prefixes.move_to_end(key)
            elif len(self.prefixes) < self.max_prefixes or not all(one.reading for one in self.prefixes.values()):
                if not self._scheduler.takes(tokens):
                    return
                prefix = self._read_prefix(request, key, tokens)
        if prefix is not None and prefix.reading:
            return
        seen = request.document.cache.get_seq_length() if request.document is not None else 0
        if prefix is not None and prefix.cache is not None:
            seen = prefix.tokens
        if self._scheduler.takes(len(request.ids) - seen) and self._room():
            self._enter(request, partial(self._own, request, prefix), seen)

    def _shared_tokens(self, request: ServerRequest) -> int:
        """Tokens of the prefix that a prompt shares with others; 0 where it is not read apart."""
        tokens = min(request.shared_tokens, len(request.ids) - 1) - self._tail
        apart = self.max_prefixes and request.has_defaults and tokens >= MIN_PREFIX
        return tokens if apart else 0

    def _read_prefix(self, request: ServerRequest, key: tuple[str, str], tokens: int) -> SharedPrefix:
        """Begin to read a shared prefix, in the place of the one that was used least recently."""
        # First: where it raises, nobody waits for what is never read.
        cache = self._spec.cache(tokens + self._tail + 1)
        if len(self.prefixes) >= self.max_prefixes:
            oldest = next(one for one, prefix in self.prefixes.items() if not prefix.reading)
            self.prefixes.pop(oldest).cache = None  # answers that came from it hold it too
        prefix = self.prefixes[key] = SharedPrefix(tokens)

        def read() -> None:
            if reader.sequence is not None and reader.sequence.finish_reason is not None:
                prefix.reading = False
                prefix.cache = cache if reader.sequence.finish_reason == "read" else None

        reader = ServerRequest(
            request.ids[:tokens], 0, owner=request.owner, purpose="prefix", parks=False, on_change=read, cache=cache
        )
        request.prefix_read = tokens
        self._enter(reader, existing(cache), 0)
        return prefix

    @property
    def _tail(self) -> int:
        """Tokens of a prompt's end before which the last eviction comes: what is shared ends before them."""
        return self._spec.settings.local_len or 0

    def _own(self, request: ServerRequest, prefix: SharedPrefix | None) -> BoundedCache:
        """A cache of its own, that has read a document, a shared prefix, or nothing."""
        if request.document is not None:
            cache = request.document.open(len(request.ids))
        elif prefix is not None and prefix.cache is not None:
            try:
                cache = prefix.cache.fork(len(request.ids))
            except CannotFork:  # a prompt of this length is read otherwise from its beginning on
                cache = self._spec.cache(len(request.ids), request.settings, request.policy)
        else:
            cache = self._spec.cache(len(request.ids), request.settings, request.policy)
        request.cache, request.document = cache, None
        return cache

    def _enter(self, request: ServerRequest, make_cache: Callable[[], BoundedCache], seen: int) -> bool:
        """Admit a request, whose cache has seen so many of its tokens, if it is its turn. Raises ValueError as ``Engine.add``."""
        left, background = len(request.ids) - seen, request.purpose == "document"
        if not self._scheduler.takes(left, background=background):
            return False
        request.sequence = self._batch.add(request, make_cache)
        self._scheduler.enter(request.sequence, left, background=background)
        self.queue = [one for one in self.queue if one is not request]
        self.active.append(request)
        if request.purpose == "answer":
            self.counters.queue_s.observe(request.sequence.began - request.submitted)
        return True

    def _room(self) -> bool:
        """Whether a cache may be made; the waiting one that was used least recently goes for it, when its file is written."""
        while self.caches >= self.max_caches:
            if not self._sessions.drop_oldest():
                return False
        return True


def existing(cache: BoundedCache) -> Callable[[], BoundedCache]:
    """A ``make_cache`` for a cache that is there already."""
    return lambda: cache
