"""Caches that wait for the next turn of their conversations: in memory, and in files where there is a store."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ..cache.bounded import BoundedCache
from .request import LOG, PrefixKey, ServerRequest
from .store import SessionSpec, Store

MAX_LOADS = 2
"""Files that are tried for a request, at most: one that was written meanwhile is worth a second try."""


@dataclass(eq=False)
class ParkedSession:
    """A cache that waits for the next turn.

    Attributes:
        saving: its file is being written, so nobody may go on with it. settled: there is nothing more to write.
    """

    key: PrefixKey
    cache: BoundedCache
    saving: bool = False
    settled: bool = False


class Sessions:
    """Sessions that wait for their next turn. Methods but ``write`` and ``close`` are called with the engine's lock held.

    Args:
        spec: of the sessions. store: None keeps sessions in memory alone.
        changed: the engine's condition, notified when a file was written or read.
    """

    def __init__(self, spec: SessionSpec, store: Store | None, changed: threading.Condition) -> None:
        self.spec, self.store, self._changed = spec, store, changed
        self._parked: OrderedDict[str, ParkedSession] = OrderedDict()
        # Files are read and written by threads of their own, so that nobody's answer waits for them.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="locret-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="locret-save")

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, name: str) -> bool:
        return name in self._parked

    def find(self, request: ServerRequest) -> ParkedSession | None:
        """The session in memory that has read most of a prompt's beginning and nothing else."""
        if not request.has_defaults:
            return None
        keys = (parked.key for parked in self._parked.values())
        best = request.prefixes.longest(keys, request.owner, request.document_id)
        parked = None if best is None else self._parked[best.name]
        return None if parked is None or parked.cache.context.outgrown(len(request.ids)) else parked

    def find_file(self, request: ServerRequest) -> PrefixKey | None:
        """The key of the file that has, as ``find``. It is looked for again when files have changed: this is asked at every step,
        for every request that waits."""
        if not request.has_defaults or self.store is None or request.loads >= MAX_LOADS:
            return None
        if request.store_version != self.store.version:
            request.store_version = self.store.version  # before the keys: what comes meanwhile is found next time
            keys = self.store.sessions(request.owner)
            request.file = request.prefixes.longest(keys, request.owner, request.document_id)
        return request.file

    def take(self, parked: ParkedSession) -> None:
        """Let a session go: a request goes on with it."""
        del self._parked[parked.key.name]

    def drop_oldest(self) -> bool:
        """Let the session go that was used least recently, of those whose files are written; False where there is none."""
        oldest = next((parked for parked in self._parked.values() if parked.settled), None)
        if oldest is not None:
            self.take(oldest)
        return oldest is not None

    def park(self, request: ServerRequest, cache: BoundedCache, ids: array[int]) -> None:
        """Have a request's cache, which has read ``ids``, wait for the next turn, and write its file."""
        goes_on = request.session and request.session not in self
        name = request.session if goes_on else f"session_{secrets.token_hex(16)}"
        key = PrefixKey.of(name, request.owner, request.document_id, ids)
        parked = ParkedSession(key, cache, settled=self.store is None)
        self._parked[name] = parked
        if self.store is not None:
            self.write(self._save, parked, self.store)

    def load(self, request: ServerRequest, key: PrefixKey) -> None:
        """Read a request's session from its file; ``loading`` ends with it, ``cache`` stays None where it cannot be read."""
        request.loading, request.loads = True, request.loads + 1

        def load() -> None:
            assert self.store is not None
            cache = None
            try:
                cache = self.store.load(key)
            except Exception:  # the store has caught what a file can do
                LOG.exception("a session could not be loaded")
            if cache is not None and cache.context.outgrown(len(request.ids)):
                cache = None
            with self._changed:
                request.loading, request.cache = False, cache
                request.session = request.session if cache is not None else ""
                self._changed.notify_all()

        self._loader.submit(load)

    def forget(self, document_id: str) -> None:
        """Drop a document's file, after what is being written, and all sessions about it."""
        self._parked = OrderedDict(
            (name, one) for name, one in self._parked.items() if one.key.document_id != document_id
        )
        if self.store is not None:
            self.write(self.store.forget, document_id)

    def write(self, act: Callable[..., None], *given: object) -> None:
        """Change files, one after another. Does not wait."""
        with suppress(RuntimeError):  # its thread has ended
            self._saver.submit(act, *given)

    def _save(self, parked: ParkedSession, store: Store) -> None:
        """Write a session's file, unless it has gone on already."""
        name = parked.key.name
        with self._changed:
            if self._parked.get(name) is not parked:
                return
            parked.saving = True
        try:
            store.save(parked.key, parked.cache)
        except Exception:  # the store has caught what a disk can do
            LOG.exception("a session could not be saved")
        with self._changed:
            parked.saving, parked.settled = False, True
            gone = name not in self
            self._changed.notify_all()
        if gone:  # its document was deleted meanwhile
            store.remove(name)

    def close(self) -> None:
        """Wait for all files, and let another server have the folder."""
        for threads in (self._saver, self._loader):
            threads.shutdown()
        if self.store is not None:
            self.store.close()
