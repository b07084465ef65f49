"""The engine: one thread owns the model, and all requests share its forwards (see ``runtime.batch``).

Every session has one cache of fixed size, so what fits is counted before the start: at most ``sessions`` caches exist, those
of requests that run and those that wait for the next turn of their conversation together. A prompt that begins with all that
a waiting cache has read goes on from it.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..documents.document import Document, Progress
from ..heads import RetainingHeads
from ..policies.base import Policy
from ..runtime.batch import Batch, Request, Text
from ..runtime.session import Sampling, stop_ids
from ..settings import RunSettings


class Busy(Exception):
    """The queue is full. ``retry_after``: seconds after which another try makes sense."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait already")
        self.retry_after = max(1, waiting)


@dataclass(eq=False)
class Job:
    """One request on its way through the engine.

    Attributes:
        on_change: called by the engine's thread after every token and at the end; must not block.
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
    text: Text | None = None
    cache: BoundedCache | None = None
    evictions: int = 0
    kept_rows: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        return self.text.prompt_read if self.text is not None else 0


@dataclass
class Idle:
    """A cache that waits for the next turn, and the ids that it has read."""

    owner: str
    document: Document | None
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
    first_token_s: list[float] = field(default_factory=list)
    """Of requests that ended since somebody last looked."""


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

    def submit(self, job: Job) -> None:
        """Queue a request. Raises Busy where too many wait, RuntimeError where the engine stops."""
        with self._changed:
            if self._stopping:
                raise RuntimeError("the server is stopping")
            waiting = sum(job.text is None or job.text.cache is None for job in self._jobs) + len(self._inbox)
            if waiting >= self.queue:
                self.figures.refused += 1
                raise Busy(waiting)
            self._inbox.append(("add", job))
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

        job = Job("", ids, None, 0, Sampling(), 0, changed, cache=cache)
        self.submit(job)
        while not done.wait(0.2):
            if progress is not None:
                progress(cache.get_seq_length(), len(ids))
        assert job.text is not None
        if job.text.error is not None:
            raise job.text.error
        if job.text.finish_reason != "read":
            raise RuntimeError("the server is stopping")

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

    def forget(self, owner: str) -> None:
        """Drop an owner's idle caches."""
        with self._changed:
            for key in [key for key, idle in self._idle.items() if idle.owner == owner]:
                del self._idle[key]

    @property
    def running(self) -> int:
        """Requests with a cache."""
        return len(self._batch.running)

    @property
    def waiting(self) -> int:
        """Requests without one yet."""
        return max(0, len(self._jobs) - self.running) + len(self._inbox)

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
            self._batch.step()
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
        elif job.text is not None:
            self._batch.cancel(job.text)
        else:  # it was never added
            job.text = Text(Request(job.ids, lambda: self._cache(job)))
            job.text.end("cancelled")

    def _cache(self, job: Job) -> BoundedCache:
        """The cache of a request whose turn it is: one that goes on, or one of its own, for which an idle one goes."""
        if job.cache is not None:  # a document that is read; its cache is counted among the documents
            return job.cache
        with self._changed:
            found = self._best(job) if job.settings is None and job.policy is None else None
            if found is not None:
                job.cache = self._idle.pop(found).cache
                return job.cache
            while len(self._idle) + len(self._batch.running) >= self.sessions and self._idle:
                self._idle.popitem(last=False)
        if job.document is not None:
            job.cache = job.document.open(len(job.ids))
        else:
            policy = job.policy or self.policy
            heads = self.heads if policy.needs_heads else None
            job.cache = BoundedCache(job.settings or self.settings, policy, heads, prompt_length=len(job.ids))
        return job.cache

    def _best(self, job: Job) -> int | None:
        """The owner's idle cache that has read most of the prompt's beginning and nothing else."""
        best, most = None, 0
        for key, idle in self._idle.items():
            seen = len(idle.ids)
            mine = idle.owner == job.owner and idle.document is job.document
            if mine and most < seen < len(job.ids) and idle.ids == job.ids[:seen]:
                best, most = key, seen
        return best

    def _report(self) -> None:
        """Tell every request what changed, and let those that ended go."""
        for job in list(self._jobs):
            text = job.text
            assert text is not None
            if job.cache is not None and job.cache.layers:
                job.evictions, job.kept_rows = job.cache.counters.evictions, max(job.cache.kept_rows)
            if text.finish_reason is not None:
                self._ended(job, text)
            job.on_change()

    def _ended(self, job: Job, text: Text) -> None:
        with self._changed:
            self._jobs.remove(job)
        figures = self.figures
        figures.requests += 1
        figures.cancelled += text.finish_reason == "cancelled"
        figures.failed += text.finish_reason == "error"
        figures.prompt_tokens += len(job.ids)
        figures.cached_tokens += text.prompt_read
        figures.new_tokens += len(text.tokens)
        figures.evictions += job.evictions
        if text.first_token_s is not None:
            figures.first_token_s.append(text.first_token_s)
        good = text.finish_reason in ("stop", "length") and job.settings is None and job.policy is None
        if good and job.cache is not None and not job.cache.unfinished and not job.cache.reread_positions:
            ids = (job.ids + array("i", text.tokens))[: job.cache.get_seq_length()]
            self._idle[next(self._keys)] = Idle(job.owner, job.document, ids, job.cache)
        job.cache = None

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
