"""Sessions that wait for their next turn, in memory and in files; and the admission of requests, each with its cache: a
session's, a copy of a document's or of a shared prefix's, or an empty one."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..documents.prefix_cache import PrefixCache
from ..engine import BoundedCache, CacheFile, CannotFork, Engine, Sequence
from ..text.tokens import hash_ids
from .figures import Counters
from .request import LOG, PrefixKey, Prompt, ServerRequest
from .store import SessionSpec, Store

MAX_LOADS = 2
"""Files that are tried for a request, at most: one that was written meanwhile is worth a second try."""


@dataclass(eq=False)
class ParkedSession:
    """A cache that waits for the next turn.

    Attributes:
        keys: prompt prefixes that continue it; one of them may omit the thoughts.
        prompt: hash of the prompt that it has answered; '' where it has read more than that.
        saving: whether its file is being written. No request may continue it then. settled: whether nothing is left to write.
    """

    keys: tuple[PrefixKey, ...]
    cache: BoundedCache
    prompt: str = ""
    saving: bool = False
    settled: bool = False

    @property
    def name(self) -> str:
        """Name of the session."""
        return self.keys[0].name


class Sessions:
    """Sessions that wait for their next turn. Methods but ``write`` and ``close`` are called with the engine's lock held.

    Args:
        spec: of the sessions. store: None keeps sessions in memory alone.
        changed: the engine's condition, notified when a file was written or read.
    """

    def __init__(self, spec: SessionSpec, store: Store | None, changed: threading.Condition) -> None:
        self.spec, self.store, self._changed = spec, store, changed
        self.parked: OrderedDict[str, ParkedSession] = OrderedDict()
        # Files are read and written by threads of their own, so that nobody's answer waits for them.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="locret-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="locret-save")

    def find(self, request: ServerRequest) -> PrefixKey | None:
        """Key of the session that has read the longest prefix of a prompt, and nothing else but thoughts: in memory, or in a file
        where that has more. Files are looked through when they have changed: this is asked at every step, for every request
        that waits."""
        about = request.owner, request.document_id
        best = request.prompt.longest((key for parked in self.parked.values() for key in parked.keys), *about)
        tokens = len(request.prompt.ids)
        grown = best is not None and self.parked[best.name].cache.context.outgrown(tokens + best.skipped)
        best, lookup = None if grown else best, request.lookup
        if self.store is None or lookup.load_tries >= MAX_LOADS:
            return best
        if lookup.store_version != self.store.version:
            lookup.store_version = self.store.version  # before the keys: what comes meanwhile is found next time
            lookup.file = request.prompt.longest(self.store.sessions(request.owner), *about)
        return max(filter(None, (best, lookup.file)), key=lambda key: key.tokens, default=None)

    def twin(self, request: ServerRequest) -> ParkedSession | None:
        """The session that has answered an equal prompt, in memory, where its answer can be taken back."""
        tokens = len(request.prompt.ids)
        about = request.owner, request.document_id, request.prompt.hash(tokens)
        for parked in self.parked.values():
            if (parked.keys[0].owner, parked.keys[0].document_id, parked.prompt) == about:
                return parked if parked.cache.can_take_back(parked.cache.get_seq_length() - tokens + 1) else None
        return None

    def park(self, request: ServerRequest, cache: BoundedCache, read: Iterable[tuple[array[int], int]]) -> None:
        """Have a request's cache, which has ``read`` this, see there, wait for the next turn, and write its file."""
        known, unnamed = request.lookup.name, partial(PrefixKey, "", request.owner, request.document_id)
        keys = {unnamed(len(ids), hash_ids(ids), skipped) for ids, skipped in read}
        fresh = known if known and known not in self.parked else f"session_{secrets.token_hex(16)}"
        name = next((name for name, held in self._held(request.owner).items() if held == keys), fresh)
        exact = cache is request.cache and not request.lookup.skipped
        whole = request.prompt.hash(len(request.prompt.ids)) if exact else ""
        named = tuple(replace(key, name=name) for key in keys)
        parked = self.parked[name] = ParkedSession(named, cache, whole, settled=self.store is None)
        self.parked.move_to_end(name)
        if self.store is not None:
            self.write(self._save, parked, self.store)

    def _held(self, owner: str) -> dict[str, set[PrefixKey]]:
        """Keys of an owner's sessions, by name. One that has read the same as a new one gives its place. Else a prompt that comes
        again and again would push out all others."""
        held = defaultdict[str, set[PrefixKey]](set)
        kept = [] if self.store is None else self.store.sessions(owner)
        for key in (*(key for parked in self.parked.values() for key in parked.keys), *kept):
            held[key.name].add(replace(key, name=""))
        return held

    def load(self, request: ServerRequest, key: PrefixKey) -> None:
        """Read a request's session from its file; ``loading`` ends with it, ``cache`` stays None where it cannot be read."""
        lookup = request.lookup
        lookup.loading, lookup.load_tries = True, lookup.load_tries + 1

        def load() -> None:
            assert self.store is not None
            cache = None
            try:
                cache = self.store.load(key)
            except Exception:  # the store has caught what a file can do
                LOG.exception("a session could not be loaded")
            if cache is not None and cache.context.outgrown(len(request.prompt.ids) + key.skipped):
                cache = None
            with self._changed:
                lookup.loading, request.cache = False, cache
                lookup.name, lookup.skipped = (lookup.name, key.skipped) if cache is not None else ("", 0)
                self._changed.notify_all()

        self._loader.submit(load)

    def forget(self, document_id: str) -> None:
        """Drop a document's file, after pending writes, and all sessions about the document."""
        for parked in [one for one in self.parked.values() if one.keys[0].document_id == document_id]:
            del self.parked[parked.name]
        if self.store is not None:
            self.write(self.store.forget, document_id)

    def write(self, act: Callable[..., None], *given: object) -> None:
        """Change files, one after another. Does not wait."""
        with suppress(RuntimeError):  # its thread has ended
            self._saver.submit(act, *given)

    def _save(self, parked: ParkedSession, store: Store) -> None:
        """Write a session's file, unless the session has been continued."""
        with self._changed:
            if self.parked.get(parked.name) is not parked:
                return
            parked.saving = True
        try:
            make = partial(CacheFile.of, parked.cache, self.spec.origin(), document=PrefixKey.record(parked.keys))
            store.save(parked.name, parked.keys[0].owner, make, parked.keys)
        except Exception:  # the store has caught what a disk can do
            LOG.exception("a session could not be saved")
        with self._changed:
            parked.saving, parked.settled = False, True
            gone = parked.name not in self.parked
            self._changed.notify_all()
        if gone:  # its document was deleted meanwhile
            store.remove(parked.name)

    def close(self) -> None:
        """Wait for all files, and let another server have the folder."""
        for threads in (self._saver, self._loader):
            threads.shutdown()
        if self.store is not None:
            self.store.close()


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
