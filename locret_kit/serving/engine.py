"""The engine: one thread owns the model, and all requests share its forwards (see ``runtime.batch``).

Every session has one cache of fixed size, so what fits is counted before the start: at most ``sessions`` caches exist, those
of requests that run and those that wait for the next turn of their conversation together. A prompt that begins with all that
a waiting cache has read goes on from it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from prometheus_client import Histogram
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..documents.document import Document, Progress
from ..heads import RetainingHeads
from ..policies.base import Policy
from ..runtime.batch import Batch, Request, Text
from ..runtime.session import Sampling, stop_ids
from ..settings import RunSettings

LOG = logging.getLogger("locret_kit.serving")


class Stopping(RuntimeError):
    """The engine takes nothing more, and what ran is cancelled."""


BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Bounds of the histograms, in seconds."""


class Busy(Exception):
    """The queue is full. ``retry_after``: seconds after which another try makes sense."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait already")
        self.retry_after = max(1, waiting)


@dataclass(eq=False)
class Job:
    """One request on its way through the engine.

    Attributes:
        document, about: the document that the prompt goes on from, and its id. The engine lets go of the document when the
            job has its own copy.
        on_change: called by the engine's thread after every token and at the end; must not block.
        keeps: whether the cache may wait for a next turn.
    """

    owner: str
    ids: array[int]
    document: Document | None
    max_new_tokens: int
    sampling: Sampling
    seed: int
    on_change: Callable[[], None]
    settings: RunSettings | None = None
    policy: Policy | None = None
    about: str = ""
    keeps: bool = True
    text: Text | None = None
    cache: BoundedCache | None = None
    evictions: int = 0
    kept_rows: int = 0

    reads_document: bool = False

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        return self.text.prompt_read if self.text is not None else 0


@dataclass
class Idle:
    """A cache that waits for the next turn, and the ids that it has read."""

    owner: str
    about: str
    ids: array[int]
    cache: BoundedCache


@dataclass
class Figures:
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
    first_token_s: Histogram = field(
        default_factory=lambda: seconds("first_token", "From a request to its first token")
    )
    token_s: Histogram = field(default_factory=lambda: seconds("token", "Per token after the first, of each request"))


def seconds(name: str, says: str) -> Histogram:
    """An empty histogram of times."""
    return Histogram(f"locret_{name}_seconds", says, buckets=BUCKETS, registry=None)


class Engine:
    """Runs requests.

    Args:
        settings, policy, heads: of every session, unless a request says otherwise.
        sessions: caches at once, running and idle. queue: requests that may wait for one. piece: see ``Batch``.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RunSettings, policy: Policy,
        heads: RetainingHeads | None, *,
        sessions: int = 8, queue: int = 64, piece: int = 512,
    ) -> None:  # fmt: skip
        for name, value in (("sessions", sessions), ("queue", queue)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.settings, self.policy, self.heads = settings, policy, heads
        self.sessions, self.queue = sessions, queue
        self.figures = Figures()
        self._batch = Batch(model, stop_ids(model, tokenizer), most=sessions, piece=piece)
        self._idle: OrderedDict[int, Idle] = OrderedDict()
        self._keys = count()
        self._jobs: list[Job] = []
        self._inbox: list[tuple[str, Job]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="locret-engine", daemon=True)
        self._thread.start()

    # ---- from other threads ----------------------------------------------------------------------------------------

    def submit(self, *jobs: Job) -> None:
        """Queue requests: all, or none.

        Raises:
            ValueError: more at once than may wait. Busy: too many wait. Stopping: the engine stops.
        """
        if len(jobs) > self.queue:
            raise ValueError(f"{len(jobs)} answers must be at most {self.queue}, the requests that may wait")
        with self._changed:
            if self._stopping:
                raise Stopping("the server is stopping")
            waiting = self._waiting()
            if waiting + len(jobs) > self.queue:
                self.figures.refused += len(jobs)
                raise Busy(waiting)
            self._inbox += [("add", job) for job in jobs]
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Let a request leave, at whatever step it is."""
        with self._changed:
            self._inbox.append(("cancel", job))
            self._changed.notify()

    def read(self, model: PreTrainedModel, ids: array[int], cache: BoundedCache, progress: Progress | None) -> None:
        """A ``documents.Reader``: read tokens into a cache, among the other requests. Blocks until it is done.

        Raises:
            Busy: see ``submit``. Exception: as reading raises.
        """
        done = threading.Event()

        def changed() -> None:
            if job.text is not None and job.text.finish_reason is not None:
                done.set()

        job = Job("", ids, None, 0, Sampling(), 0, changed, cache=cache, keeps=False, reads_document=True)
        self.submit(job)
        try:
            while not done.wait(0.2):
                if progress is not None:
                    progress(cache.get_seq_length(), len(ids))
        finally:  # where progress raises, the cache is free before this ends
            self.cancel(job)
            done.wait()
        assert job.text is not None
        if job.text.error is not None:
            raise job.text.error
        if job.text.finish_reason != "read":
            raise Stopping("the server is stopping")

    def stop(self, wait: float = 10.0) -> None:
        """End: requests that run are given ``wait`` seconds, then all are cancelled."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(wait)
        with self._changed:
            for job in self._jobs:
                self._inbox.append(("cancel", job))
            self._changed.notify()
        self._thread.join(wait)

    def forget(self, about: str) -> None:
        """Drop what waits for a next turn about a document that is deleted. Answers that run go on, in their own caches."""
        with self._changed:
            for key in [key for key, idle in self._idle.items() if idle.about == about]:
                del self._idle[key]
            for job in [*self._jobs, *(job for _, job in self._inbox)]:
                job.keeps = job.keeps and job.about != about

    @property
    def running(self) -> int:
        """Requests with a cache."""
        return len(self._batch.running)

    @property
    def waiting(self) -> int:
        """Requests without one yet."""
        with self._changed:
            return self._waiting()

    def _waiting(self) -> int:
        added = sum(what == "add" for what, _ in self._inbox)
        return added + sum(job.text is not None and job.text.waits for job in self._jobs)

    @property
    def caches(self) -> int:
        """Caches of sessions that exist now, at most ``sessions``; those of documents are not among them."""
        with self._changed:
            return len(self._idle) + self._in_use()

    def _in_use(self) -> int:
        return sum(job.cache is not None and not job.reads_document for job in self._jobs)

    @property
    def idle(self) -> int:
        """Caches that wait for a next turn."""
        return len(self._idle)

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._batch.busy or self._stopping):
                    self._changed.wait()
                if self._stopping and not (self._inbox or self._batch.busy):
                    return
                inbox, self._inbox = self._inbox, []
                for what, job in inbox:
                    self._take(what, job)
            try:
                self._batch.step()
            except Exception as error:  # of one text or one forward, the batch has caught it already
                LOG.exception("a step failed")
                self._batch.fail(error)
            self.figures.forwards += 1
            self._report()

    def _take(self, what: str, job: Job) -> None:
        if what == "add":
            request = Request(job.ids, lambda: self._cache(job), job.max_new_tokens, job.sampling, job.seed)
            try:
                job.text = self._batch.add(request)
            except ValueError as error:
                job.text = Text(request)
                job.text.end("error", error)
            self._jobs.append(job)
        elif job in self._jobs:
            assert job.text is not None
            self._batch.cancel(job.text)
            self._tell(job)  # now: the next step counts on its cache
        elif job.text is None:  # it was never added
            job.text = Text(Request(job.ids, lambda: self._cache(job)))
            job.text.end("cancelled")

    def _cache(self, job: Job) -> BoundedCache:
        """The cache of a request whose turn it is: one that goes on, or one of its own, for which an idle one goes."""
        if job.cache is not None:  # a document that is read; its cache is counted among the documents
            return job.cache
        with self._changed:
            found = self._best(job) if job.settings is None and job.policy is None else None
            if found is not None:
                job.cache, job.document = self._idle.pop(found).cache, None
                return job.cache
            while len(self._idle) + self._in_use() >= self.sessions and self._idle:
                self._idle.popitem(last=False)
        if job.document is not None:
            cache = job.document.open(len(job.ids))
        else:
            policy = job.policy or self.policy
            heads = self.heads if policy.needs_heads else None
            cache = BoundedCache(job.settings or self.settings, policy, heads, prompt_length=len(job.ids))
        cache.bind(self.model)
        job.cache, job.document = cache, None
        return cache

    def _best(self, job: Job) -> int | None:
        """The owner's idle cache that has read most of the prompt's beginning and nothing else."""
        best, most = None, 0
        for key, idle in self._idle.items():
            seen = len(idle.ids)
            mine = idle.owner == job.owner and idle.about == job.about
            if mine and most < seen < len(job.ids) and idle.ids == job.ids[:seen]:
                best, most = key, seen
        return best

    def _report(self) -> None:
        """Tell every request what changed, and let those that ended go."""
        for job in list(self._jobs):
            self._tell(job)

    def _tell(self, job: Job) -> None:
        text = job.text
        assert text is not None
        if job.cache is not None and job.cache.layers:
            job.evictions, job.kept_rows = job.cache.counters.evictions, max(job.cache.kept_rows)
        if text.finish_reason is not None:
            self._ended(job, text)
        try:
            job.on_change()
        except RuntimeError:  # the event loop of its request is closed
            self._batch.cancel(text)

    def _ended(self, job: Job, text: Text) -> None:
        self._count(job, text)
        with self._changed:
            self._jobs.remove(job)
            good = text.finish_reason in ("stop", "length") and job.settings is None and job.policy is None
            if (
                job.keeps
                and good
                and job.cache is not None
                and not job.cache.unfinished
                and not job.cache.reread_positions
            ):
                ids = (job.ids + array("i", text.tokens))[: job.cache.get_seq_length()]
                self._idle[next(self._keys)] = Idle(job.owner, job.about, ids, job.cache)
            job.cache = job.document = None

    def _count(self, job: Job, text: Text) -> None:
        figures = self.figures
        if text.error is not None and not isinstance(text.error, ValueError):
            LOG.error("a request failed", exc_info=text.error)
        if text.error is not None:
            text.error.__traceback__ = None  # its frames hold the cache
        figures.requests += 1
        figures.cancelled += text.finish_reason == "cancelled"
        figures.failed += text.finish_reason == "error"
        figures.prompt_tokens += len(job.ids)
        figures.cached_tokens += text.prompt_read
        figures.new_tokens += len(text.tokens)
        figures.evictions += job.evictions
        if text.first_token_s is not None and text.ended_s is not None:
            figures.first_token_s.observe(text.first_token_s)
            if len(text.tokens) > 1:
                figures.token_s.observe((text.ended_s - text.first_token_s) / (len(text.tokens) - 1))

    def session_settings(self, budget: int | None) -> RunSettings | None:
        """Settings of a request that asks for its own budget, at most the server's.

        Raises:
            ValueError: more than a session has.
        """
        if budget is None:
            return None
        most = self.settings.budget
        if isinstance(most, int) and budget > most:
            raise ValueError(f"budget={budget} must be at most {most}, the slots of a session")
        return replace(self.settings, budget=budget)
