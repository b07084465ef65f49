"""Who enters next, and with which cache: one that waits for the next turn, in memory or in a file, a copy of one that has read a
document or an equal beginning, or an empty one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..cache.bounded import BoundedCache
from ..cache.fork import CannotFork
from ..heads import RetainingHeads
from ..policies.policy import Policy
from ..runtime.batch import Batch, Request, Text
from ..runtime.scheduler import PromptScheduler
from ..runtime.session import Sampling
from ..settings import RunSettings
from .figures import Figures
from .jobs import Beginning, Idle, Job
from .past import Past
from .store import Store

LOG = logging.getLogger("locret_kit.serving")
LOADS = 2
"""Files that are tried for a request, at most: one that another server has written meanwhile is worth a second try."""
SHORTEST = 32
"""Tokens of an equal beginning, at least: fewer are read as quickly as they are copied."""


def given(cache: BoundedCache) -> Callable[[], BoundedCache]:
    """What gives a cache that is there."""
    return lambda: cache


class Admission:
    """The part of the engine that lets requests enter. Its methods are called by the engine's thread alone.

    Args:
        batch: where they enter. scheduler: whose prompt is read next. The others are the engine's.
    """

    def __init__(
        self, batch: Batch, scheduler: PromptScheduler[Text], settings: RunSettings, policy: Policy,
        heads: RetainingHeads | None, *, sessions: int, store: Store | None, beginnings: int, shares: bool,
    ) -> None:  # fmt: skip
        self._batch, self._scheduler = batch, scheduler
        self.settings, self.policy, self.heads = settings, policy, heads
        self.sessions, self.store = sessions, store
        self.figures = Figures()
        self.beginnings, self._shares = beginnings, shares
        self._begun: OrderedDict[tuple[str, str], Beginning] = OrderedDict()
        self._idle: OrderedDict[str, Idle] = OrderedDict()
        self._queue: list[Job] = []
        self._jobs: list[Job] = []
        # Files are read by a thread of their own, so that nobody's answer waits for them.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="locret-load")

    def _tell(self, job: Job) -> None:
        """Tell a request what changed."""
        raise NotImplementedError

    def _post(self, what: str, job: Job | None = None) -> None:
        """Leave word for the engine's thread."""
        raise NotImplementedError

    def _not_admitted(self, job: Job) -> Text:
        """The text of a request that has none yet, so that it can end."""
        return Text(Request(job.ids, partial(self._own, job, None)))

    def _leave_queue(self, job: Job, reason: str, error: Exception | None = None) -> None:
        """End a request that was not admitted."""
        job.text = self._not_admitted(job)
        job.text.end(reason, error)
        self._queue = [one for one in self._queue if one is not job]
        self._jobs.append(job)
        self._tell(job)

    def _admit(self) -> None:
        """Give those that wait their turns and their caches, in the order in which they came."""
        for job in list(self._queue):
            if not job.loading:
                try:
                    self._admit_one(job)
                except Exception as error:  # of one request, which ends alone
                    self._leave_queue(job, "error", error)

    def _admit_one(self, job: Job) -> None:
        """Let a request enter, or begin to read its session from its file; it goes on waiting where neither can be yet."""
        if job.cache is not None:  # a document's, or a session's from its file
            self._enter(job, given(job.cache), job.cache.get_seq_length())
            return
        idle, stored = self._idle_for(job), self._stored_for(job)
        seen = idle.past.tokens if idle is not None else 0
        if stored is not None and stored.tokens > seen:
            if self._room():
                self._load(job, stored)
        elif idle is None:
            self._begin(job)
        elif not idle.saving and self._enter(job, given(idle.cache), seen):
            job.cache, job.name, job.document = idle.cache, idle.past.name, None
            del self._idle[idle.past.name]

    def _idle_for(self, job: Job) -> Idle | None:
        """The cache in memory that has read most of the prompt's beginning and nothing else."""
        if not job.plain:
            return None
        best = job.prefixes.longest((idle.past for idle in self._idle.values()), job.owner, job.about)
        return None if best is None else self._idle[best.name]

    def _stored_for(self, job: Job) -> Past | None:
        """The same of files."""
        if not job.plain or self.store is None or job.loads >= LOADS:
            return None
        return job.prefixes.longest(self.store.sessions(job.owner), job.owner, job.about)

    def _begin(self, job: Job) -> None:
        """Let a request begin: with a document's cache, that of an equal beginning, or an empty one."""
        begun = self._beginning_for(job)
        if begun is not None and begun.reading:
            return
        seen = job.document.cache.get_seq_length() if job.document is not None else 0
        if begun is not None and begun.cache is not None:
            seen = begun.past.tokens
        if self._scheduler.takes(len(job.ids) - seen) and self._room():
            self._enter(job, partial(self._own, job, begun), seen)

    def _beginning_for(self, job: Job) -> Beginning | None:
        """The equal beginning that a prompt goes on from; one that is new is read before it."""
        tokens = min(job.beginning, len(job.ids) - 1) - self._tail
        if not (self.beginnings and job.plain and tokens >= SHORTEST) or self.settings.one_shot:
            return None
        key = "" if self._shares else job.owner, job.prefixes.hash(tokens)
        found = self._begun.get(key)
        if found is not None:
            self._begun.move_to_end(key)
            return found
        oldest = next((one for one, begun in self._begun.items() if not begun.reading), None)
        full = len(self._begun) >= self.beginnings
        if full and oldest is None:
            return None
        if not self._scheduler.takes(tokens):
            return Beginning(Past("", "", "", 0, ""))  # it comes with its turn
        cache = self._empty(job, tokens + self._tail + 1)  # first: where it raises, nobody waits for what is never read
        if full and oldest is not None:
            self._begun.pop(oldest).cache = None  # answers that came from it hold it too
        found = self._begun[key] = Beginning(Past("", key[0], "", tokens, key[1]))

        def read() -> None:
            if inner.text is not None and inner.text.finish_reason is not None:
                found.reading = False
                found.cache = cache if inner.text.finish_reason == "read" else None

        inner = Job(
            job.owner, job.ids[:tokens], None, 0, Sampling(), 0, read, keeps=False, cache=cache, aside=True, inner=True
        )
        self._queue.append(inner)
        job.read_first = tokens
        self._enter(inner, given(cache), 0)
        return found

    @property
    def _tail(self) -> int:
        """Tokens of a prompt's end before which the last eviction comes: what is shared ends before them."""
        return self.settings.local_len or 0

    def _empty(self, job: Job, prompt_length: int) -> BoundedCache:
        """A new cache for a prompt of so many tokens."""
        policy = job.policy or self.policy
        heads = self.heads if policy.needs_heads else None
        return BoundedCache(job.settings or self.settings, policy, heads, prompt_length=prompt_length)

    def _own(self, job: Job, begun: Beginning | None) -> BoundedCache:
        """A cache of its own, that has read a document, an equal beginning, or nothing."""
        if job.document is not None:
            cache = job.document.open(len(job.ids))
        elif begun is not None and begun.cache is not None:
            try:
                cache = begun.cache.fork(len(job.ids))
            except CannotFork:  # a prompt of this length is read otherwise from its beginning on
                cache = self._empty(job, len(job.ids))
        else:
            cache = self._empty(job, len(job.ids))
        job.cache, job.document = cache, None
        return cache

    def _enter(self, job: Job, make: Callable[[], BoundedCache], seen: int) -> bool:
        """Admit a request, whose cache has seen so many of its tokens, if it is its turn."""
        left, background = len(job.ids) - seen, job.aside and not job.inner
        if not self._scheduler.takes(left, background=background):
            return False
        self._queue.remove(job)
        self._jobs.append(job)
        request = Request(job.ids, make, job.max_new_tokens, job.sampling, job.seed, top_logprobs=job.top_logprobs)
        try:
            job.text = self._batch.add(request)
        except ValueError as error:
            job.text = Text(request)
            job.text.end("error", error)
            self._tell(job)
            return True
        self._scheduler.enter(job.text, left, background=background)
        if not job.aside:
            self.figures.queue_s.observe(job.text.began - job.asked)
        return True

    def _room(self) -> bool:
        """Whether a cache may be made; the idle one that was used least recently goes for it, when its file is written."""
        while len(self._idle) + self._in_use() >= self.sessions:
            gone = next((name for name, idle in self._idle.items() if idle.settled), None)
            if gone is None:
                return False
            del self._idle[gone]
        return True

    def _load(self, job: Job, past: Past) -> None:
        """Read a session from its file, by another thread."""
        job.loading, job.loads = True, job.loads + 1
        taken = past.name in {*self._idle, *(one.name for one in (*self._jobs, *self._queue))}
        job.name = "" if taken else past.name  # a branch of a conversation that went on gets a file of its own

        def load() -> None:
            assert self.store is not None
            try:
                job.cache = self.store.load(past, self._batch.model, self.heads, self.policy, self.settings.store)
            except Exception:  # the store has caught what a file can do
                LOG.exception("a session could not be loaded")
            finally:
                job.name = job.name if job.cache is not None else ""
                self._post("loaded", job)

        self._loader.submit(load)

    def _in_use(self) -> int:
        loaded = sum(not job.aside and (job.loading or job.cache is not None) for job in self._queue)
        return loaded + sum(not job.aside for job in self._jobs)
