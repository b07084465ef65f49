"""Who enters next, and with which cache: one that waits for the next turn, in memory or in a file, a copy of one that has read a
document or an equal beginning, or an empty one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..cache.bounded import BoundedCache
from ..cache.fork import CannotFork
from ..runtime.batch import Batch, Request, Text
from ..runtime.scheduler import PromptScheduler
from ..runtime.session import Sampling
from .figures import Figures
from .fits import Fits
from .jobs import Job
from .sessions import Sessions

SHORTEST = 32
"""Tokens of an equal beginning, at least: fewer are read as quickly as they are copied."""


@dataclass(eq=False)
class SharedPrefix:
    """An equal beginning of prompts. ``cache`` is None while it is read, and where it could not be."""

    tokens: int
    cache: BoundedCache | None = None
    reading: bool = True


class Admission:
    """The queue of requests. Its methods are called with the engine's lock held.

    Args:
        batch: where requests enter. scheduler: whose prompt is read next.
        sessions: caches that wait for a next turn. fits: what a session is.
        max_caches: sessions' caches at once, waiting and running. max_prefixes: equal beginnings in memory at
            once.
        all_owners: whether prompts of all owners share them.

    Attributes:
        queue: requests that wait, in the order in which they came. active: those that have entered and not ended.
    """

    def __init__(
        self, batch: Batch, scheduler: PromptScheduler[Text], sessions: Sessions, fits: Fits, figures: Figures, *,
        max_caches: int, max_prefixes: int, all_owners: bool,
    ) -> None:  # fmt: skip
        self._batch, self._scheduler, self._sessions, self._fits = batch, scheduler, sessions, fits
        self.figures = figures
        self.max_caches, self.max_prefixes, self._all_owners = max_caches, max_prefixes, all_owners
        self.queue: list[Job] = []
        self.active: list[Job] = []
        self._prefixes: OrderedDict[tuple[str, str], SharedPrefix] = OrderedDict()

    @property
    def caches(self) -> int:
        """Caches of sessions that exist now, or that are being read from their files."""
        loaded = sum(not job.aside and (job.loading or job.cache is not None) for job in self.queue)
        return len(self._sessions) + loaded + sum(not job.aside for job in self.active)

    @property
    def prefixes(self) -> int:
        """Equal beginnings in memory, those that are being read included."""
        return len(self._prefixes)

    def admit(self) -> list[Job]:
        """Let those that wait enter, in the order in which they came, where it is their turn and there is a cache; those that
        have ended instead, cancelled or with an error."""
        ended = []
        for job in list(self.queue):
            if job.loading:
                continue
            try:
                if not job.cancelled:
                    self._admit_one(job)
                    continue
                self.leave(job, "cancelled")
            except Exception as error:  # of one request, which ends alone
                self.leave(job, "error", error)
            ended.append(job)
        return ended

    def leave(self, job: Job, reason: str, error: Exception | None = None) -> None:
        """End a request that has not entered."""
        self.queue.remove(job)
        job.text = Text(Request(job.ids, partial(self._own, job, None)))
        job.text.end(reason, error)

    def _admit_one(self, job: Job) -> None:
        """Let a request enter, or begin to read its session from its file; it goes on waiting where neither can be yet."""
        if job.cache is not None:  # a document's, or a session's from its file
            self._enter(job, existing(job.cache), job.cache.get_seq_length())
            return
        parked, file = self._sessions.find(job), self._sessions.find_file(job)
        seen = parked.past.tokens if parked is not None else 0
        if file is not None and file.tokens > seen:
            if self._room():
                taken = file.name in self._sessions or file.name in {one.name for one in (*self.active, *self.queue)}
                job.name = "" if taken else file.name  # a branch of a conversation that went on gets a file of its own
                self._sessions.load(job, file)
        elif parked is None:
            self._begin(job)
        elif not parked.saving and self._enter(job, existing(parked.cache), seen):
            job.cache, job.name, job.document = parked.cache, parked.past.name, None
            self._sessions.take(parked)

    def _begin(self, job: Job) -> None:
        """Let a request begin: with a document's cache, that of an equal beginning, or an empty one."""
        prefix = None
        if tokens := self._shared_tokens(job):
            key = "" if self._all_owners else job.owner, job.prefixes.hash(tokens)
            prefix = self._prefixes.get(key)
            if prefix is not None:
                self._prefixes.move_to_end(key)
            elif len(self._prefixes) < self.max_prefixes or not all(one.reading for one in self._prefixes.values()):
                if not self._scheduler.takes(tokens):
                    return
                prefix = self._read_prefix(job, key, tokens)
        if prefix is not None and prefix.reading:
            return
        seen = job.document.cache.get_seq_length() if job.document is not None else 0
        if prefix is not None and prefix.cache is not None:
            seen = prefix.tokens
        if self._scheduler.takes(len(job.ids) - seen) and self._room():
            self._enter(job, partial(self._own, job, prefix), seen)

    def _shared_tokens(self, job: Job) -> int:
        """Tokens with which a prompt begins as others do; 0 where they are not read apart."""
        tokens = min(job.beginning, len(job.ids) - 1) - self._tail
        apart = self.max_prefixes and job.plain and tokens >= SHORTEST and not self._fits.settings.one_shot
        return tokens if apart else 0

    def _read_prefix(self, job: Job, key: tuple[str, str], tokens: int) -> SharedPrefix:
        """Begin to read an equal beginning, in the place of the one that was used least recently."""
        cache = self._empty(job, tokens + self._tail + 1)  # first: where it raises, nobody waits for what is never read
        if len(self._prefixes) >= self.max_prefixes:
            oldest = next(one for one, prefix in self._prefixes.items() if not prefix.reading)
            self._prefixes.pop(oldest).cache = None  # answers that came from it hold it too
        prefix = self._prefixes[key] = SharedPrefix(tokens)

        def read() -> None:
            if inner.text is not None and inner.text.finish_reason is not None:
                prefix.reading = False
                prefix.cache = cache if inner.text.finish_reason == "read" else None

        inner = Job(
            job.owner, job.ids[:tokens], None, 0, Sampling(), 0, read, keeps=False, cache=cache, aside=True, inner=True
        )
        job.read_first = tokens
        self._enter(inner, existing(cache), 0)
        return prefix

    @property
    def _tail(self) -> int:
        """Tokens of a prompt's end before which the last eviction comes: what is shared ends before them."""
        return self._fits.settings.local_len or 0

    def _empty(self, job: Job, prompt_length: int) -> BoundedCache:
        """A new cache for a prompt of so many tokens."""
        policy = job.policy or self._fits.policies[0]
        heads = self._fits.heads if policy.needs_heads else None
        return BoundedCache(job.settings or self._fits.settings, policy, heads, prompt_length=prompt_length)

    def _own(self, job: Job, prefix: SharedPrefix | None) -> BoundedCache:
        """A cache of its own, that has read a document, an equal beginning, or nothing."""
        if job.document is not None:
            cache = job.document.open(len(job.ids))
        elif prefix is not None and prefix.cache is not None:
            try:
                cache = prefix.cache.fork(len(job.ids))
            except CannotFork:  # a prompt of this length is read otherwise from its beginning on
                cache = self._empty(job, len(job.ids))
        else:
            cache = self._empty(job, len(job.ids))
        job.cache, job.document = cache, None
        return cache

    def _enter(self, job: Job, make: Callable[[], BoundedCache], seen: int) -> bool:
        """Admit a request, whose cache has seen so many of its tokens, if it is its turn. Raises ValueError as ``Batch.add``."""
        left, background = len(job.ids) - seen, job.aside and not job.inner
        if not self._scheduler.takes(left, background=background):
            return False
        request = Request(job.ids, make, job.max_new_tokens, job.sampling, job.seed, top_logprobs=job.top_logprobs)
        job.text = self._batch.add(request)
        self._scheduler.enter(job.text, left, background=background)
        self.queue = [one for one in self.queue if one is not job]
        self.active.append(job)
        if not job.aside:
            self.figures.queue_s.observe(job.text.began - job.asked)
        return True

    def _room(self) -> bool:
        """Whether a cache may be made; the waiting one that was used least recently goes for it, when its file is written."""
        while self.caches >= self.max_caches:
            if not self._sessions.drop_oldest():
                return False
        return True


def existing(cache: BoundedCache) -> Callable[[], BoundedCache]:
    """What gives a cache that is there."""
    return lambda: cache
