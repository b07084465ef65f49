"""Sessions that wait for their next turn, in memory and in files."""

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

from ..engine import BoundedCache, CacheFile
from ..text.tokens import hash_ids
from .request import LOG, PrefixKey, ServerRequest
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
        fits = best is not None and _fits(self.parked[best.name].cache, tokens + best.skipped)
        best, lookup = best if fits else None, request.lookup
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
        answered = request.sequence is not None and bool(request.sequence.written or request.sequence.stopped_by)
        exact = answered and cache is request.cache and not request.lookup.skipped
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
            if cache is not None and not _fits(cache, len(request.prompt.ids) + key.skipped):
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


def _fits(cache: BoundedCache, tokens: int) -> bool:
    """Whether a cache may go on with a prompt of so many tokens: no fewer than one that it has read a part of."""
    return tokens >= (cache.schedule.prompt_length or 0) and not cache.context.outgrown(tokens)
