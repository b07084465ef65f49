"""The engine: one thread owns the model, and all requests share its forwards (see ``runtime.batch``).

Every session has one cache of fixed size, so what fits is counted before the start: at most ``sessions`` caches exist, those
of requests that run and those that wait for the next turn of their conversation together. A prompt that begins with all that
a waiting cache has read goes on from it, in memory or from its file. Requests that wait are admitted in the order in which
they came, a short one before a long one where that keeps the bound of ``runtime.turns``.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from prometheus_client import Histogram
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..cache.fork import CannotFork
from ..documents.document import Document, Progress, describe
from ..heads import RetainingHeads
from ..naming import blaming
from ..policies.base import Policy
from ..runtime.batch import Batch, Request, Text
from ..runtime.session import Sampling, stop_ids
from ..runtime.turns import Turns
from ..settings import RunSettings
from .fits import Fits
from .past import Past, Prefixes
from .store import Store

LOG = logging.getLogger("locret_kit.serving")


class Stopping(RuntimeError):
    """The engine takes nothing more, and what ran is cancelled."""


SHORTEST = 32
"""Tokens of an equal beginning, at least: fewer are read as quickly as they are copied."""
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
        ends: asked by the engine's thread after every token; the answer ends where it says how many of its tokens stay.
        aside: the cache is not a session's: a document or an equal beginning is read.
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
    top_logprobs: int | None = None
    ends: Callable[[Sequence[int]], int | None] | None = None
    beginning: int = 0
    """Tokens with which other prompts may begin too."""
    text: Text | None = None
    cache: BoundedCache | None = None
    evictions: int = 0
    kept_rows: int = 0
    aside: bool = False
    name: str = ""
    """Of the session that it goes on."""
    loading: bool = False
    """Whether its session is being read from its file, into a cache that counts already."""
    unwanted: bool = False
    """Whether it was cancelled while its session was read."""
    read_first: int = 0
    """Tokens of an equal beginning that was read because of this request."""
    inner: bool = False
    """Whether it reads an equal beginning, so no client's."""
    asked: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(self.ids)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        return max(0, self.text.prompt_read - self.read_first) if self.text is not None else 0

    @property
    def plain(self) -> bool:
        """Whether it runs as the server is set, so that its cache fits other requests."""
        return self.settings is None and self.policy is None


@dataclass(eq=False)
class Idle:
    """A cache that waits for the next turn.

    Attributes:
        saving: its file is being written, so nobody may go on with it. settled: there is nothing more to write.
    """

    past: Past
    cache: BoundedCache
    saving: bool = False
    settled: bool = False


@dataclass(eq=False)
class Beginning:
    """An equal beginning of an owner's prompts. ``cache`` is None while it is read, and where it could not be."""

    past: Past
    cache: BoundedCache | None = None
    reading: bool = True


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
    queue_s: Histogram = field(default_factory=lambda: seconds("queue", "From a request to its admission"))
    first_token_s: Histogram = field(
        default_factory=lambda: seconds("first_token", "From a request's admission to its first token")
    )
    token_s: Histogram = field(default_factory=lambda: seconds("token", "Per token after the first, of each request"))


def seconds(name: str, says: str) -> Histogram:
    """An empty histogram of times."""
    return Histogram(f"locret_{name}_seconds", says, buckets=BUCKETS, registry=None)


def given(cache: BoundedCache) -> Callable[[], BoundedCache]:
    """What gives a cache that is there."""
    return lambda: cache


class Engine:
    """Runs requests.

    Args:
        settings, policy, heads: of every session, unless a request says otherwise.
        sessions: caches at once, running and idle. queue: requests that may wait for one. piece: see ``Batch``.
        store: where sessions are saved after each turn; None keeps them in memory alone.
        policies: others that requests and saved caches may have.
        beginnings: equal beginnings of prompts (system prompts) in memory at once, each of which has a cache beside those of
            sessions. shares: whether prompts of all owners share them; then the time of an answer tells an owner whether
            another one's prompt begins alike.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RunSettings, policy: Policy,
        heads: RetainingHeads | None, *,
        sessions: int = 8, queue: int = 64, piece: int = 512, store: Store | None = None, policies: Sequence[Policy] = (),
        beginnings: int = 2, shares: bool = False,
    ) -> None:  # fmt: skip
        for name, value in (("sessions", sessions), ("queue", queue)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.settings, self.policy, self.heads = settings, policy, heads
        self.sessions, self.queue, self.store = sessions, queue, store
        self.fits = Fits(model, settings, heads, (policy, *policies))
        if store is not None:
            store.scan(lambda saved, about: self.fits.check(saved, session=not about), self.fits.origin)
        self.figures = Figures()
        self._turns: Turns[Text] = Turns(replace(settings, one_shot=False).resolved({}, 1).chunk, piece)
        self._batch = Batch(model, stop_ids(model, tokenizer), most=1 << 30, piece=piece, turns=self._turns)
        self.beginnings, self._shares = beginnings, shares
        self._begun: OrderedDict[tuple[str, str], Beginning] = OrderedDict()
        self._idle: OrderedDict[str, Idle] = OrderedDict()
        self._queue: list[Job] = []
        self._jobs: list[Job] = []
        self._inbox: list[tuple[str, Job | None]] = []
        self._changed = threading.Condition()
        self._stopping = False
        # Files are written by one thread and read by another, so that neither an answer nor a next turn waits for both.
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="locret-save")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="locret-load")
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
        self._post("cancel", job)

    def _post(self, what: str, job: Job | None = None) -> None:
        with self._changed:
            self._inbox.append((what, job))
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

        job = Job("", ids, None, 0, Sampling(), 0, changed, cache=cache, keeps=False, aside=True)
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
        """End: requests that run are given ``wait`` seconds, then all are cancelled. What is to be saved is saved."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(wait)
        with self._changed:
            self._inbox += [("cancel", job) for job in (*self._queue, *self._jobs)]
            self._changed.notify()
        self._thread.join(max(wait, 10.0))  # a forward cannot be cut short
        for threads in (self._saver, self._loader):
            threads.shutdown()
        if self.store is not None:
            self.store.close()

    def load_document(self, path: Path) -> Document:
        """The document in a file. Raises OSError, ValueError as ``Document.load`` and ``Fits.check``."""
        saved, _ = describe(path)
        with blaming(str(path), ValueError):
            self.fits.check(saved)
        policy = next((policy for policy in self.fits.policies if policy.name == saved.policy), None)
        return Document.load(path, self.model, self.tokenizer, self.heads, policy)

    def save_document(self, name: str, owner: str, document: Document) -> None:
        """Write a document's file, when there is a store, in the order of all files. Does not wait."""
        if self.store is not None:
            self._write(self.store.save_document, name, owner, document)

    def forget(self, about: str) -> None:
        """Drop a document's file, and what waits for a next turn about it. Answers that run go on, in their own caches."""
        with self._changed:
            for name in [name for name, idle in self._idle.items() if idle.past.about == about]:
                del self._idle[name]
            for job in (*self._queue, *self._jobs, *(job for _, job in self._inbox if job is not None)):
                job.keeps = job.keeps and job.about != about
        if self.store is not None:  # after what is being written
            self._write(self.store.forget, about)

    def _write(self, act: Callable[..., None], *given: object) -> None:
        """Change files, one after another, by the thread that does."""
        with suppress(RuntimeError):  # that thread has ended
            self._saver.submit(act, *given)

    @property
    def running(self) -> int:
        """Requests with a cache."""
        return len(self._batch.running)

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        with self._changed:
            return self._waiting()

    def _waiting(self) -> int:
        return sum(what == "add" for what, _ in self._inbox) + len(self._queue)

    @property
    def caches(self) -> int:
        """Caches of sessions that exist now, at most ``sessions``; those of documents are not among them."""
        with self._changed:
            return len(self._idle) + self._in_use()

    def _in_use(self) -> int:
        loaded = sum(not job.aside and (job.loading or job.cache is not None) for job in self._queue)
        return loaded + sum(not job.aside for job in self._jobs)

    @property
    def idle(self) -> int:
        """Caches that wait for a next turn."""
        return len(self._idle)

    @property
    def begun(self) -> int:
        """Equal beginnings in memory, those that are being read included."""
        return len(self._begun)

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while True:
                    inbox, self._inbox = self._inbox, []
                    for what, job in inbox:
                        if job is not None:
                            self._take(what, job)
                    self._admit()
                    if self._batch.busy:
                        break
                    if self._stopping and not (self._queue or self._inbox):
                        return
                    if not self._inbox:
                        self._changed.wait()
            try:
                self._batch.step()
            except Exception as error:  # of one text or one forward, the batch has caught it already
                LOG.exception("a step failed")
                self._batch.fail(error)
            self.figures.forwards += 1
            self._report()

    def _report(self) -> None:
        """Tell every request what changed."""
        for job in list(self._jobs):
            self._tell(job)

    def _take(self, what: str, job: Job) -> None:
        if what == "add":
            self._queue.append(job)
        elif what == "loaded":
            job.loading = False
            if job.unwanted:
                self._leave_queue(job, "cancelled")
        elif job.loading:
            job.unwanted = True
        elif job in self._jobs:
            assert job.text is not None
            self._batch.cancel(job.text)
            self._tell(job)  # now: the next step counts on its cache
        elif job.text is None:
            self._leave_queue(job, "cancelled")

    def _leave_queue(self, job: Job, reason: str, error: Exception | None = None) -> None:
        """End a request that was not admitted."""
        job.text = Text(Request(job.ids, lambda: self._own(job, None)))
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
        if not job.plain or self.store is None:
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
        if self._turns.takes(len(job.ids) - seen) and self._room():
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
        if not self._turns.takes(tokens):
            return Beginning(Past("", "", "", 0, ""))  # it comes with its turn
        if full and oldest is not None:
            self._begun.pop(oldest).cache = None  # answers that came from it hold it too
        found = self._begun[key] = Beginning(Past("", key[0], "", tokens, key[1]))
        cache = self._empty(job, tokens + self._tail + 1)

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
        left = len(job.ids) - seen
        if not self._turns.takes(left, aside=job.aside and not job.inner):
            return False
        self._queue.remove(job)
        self._jobs.append(job)
        request = Request(
            job.ids, make, job.max_new_tokens, job.sampling, job.seed, aside=job.aside and not job.inner,
            top_logprobs=job.top_logprobs,
        )  # fmt: skip
        try:
            job.text = self._batch.add(request)
        except ValueError as error:
            job.text = Text(request)
            job.text.end("error", error)
            self._tell(job)
            return True
        self._turns.enter(job.text, left)
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
        job.loading = True
        taken = past.name in {*self._idle, *(one.name for one in (*self._jobs, *self._queue))}
        job.name = "" if taken else past.name  # a branch of a conversation that went on gets a file of its own

        def load() -> None:
            assert self.store is not None
            try:
                job.cache = self.store.load(past, self.model, self.heads, self.policy)
            except Exception:  # the store has caught what a file can do
                LOG.exception("a session could not be loaded")
            finally:
                job.name = job.name if job.cache is not None else ""
                self._post("loaded", job)

        self._loader.submit(load)

    def _tell(self, job: Job) -> None:
        """Tell a request what changed, and let it go when it has ended."""
        text = job.text
        assert text is not None
        if job.cache is not None and job.cache.layers:
            job.evictions, job.kept_rows = job.cache.counters.evictions, max(job.cache.kept_rows)
        try:
            stays = job.ends(text.tokens) if job.ends is not None and text.tokens else None
        except Exception as error:
            stays = None
            self._batch.fail(error, [text])
        if stays is not None:
            self._batch.cancel(text, "stop")
            if job.cache is not None and (more := job.cache.get_seq_length() - len(job.ids) - stays) > 0:
                job.cache.take_back(more)  # the next turn begins with the answer as it was shown
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
            cache, kept = job.cache, job.keeps and job.plain and text.finish_reason in ("stop", "length")
            job.cache = job.document = None
            if kept and cache is not None and not cache.unfinished and not cache.reread_positions:
                name = job.name if job.name and job.name not in self._idle else f"session_{secrets.token_hex(16)}"
                ids = (job.ids + array("i", text.tokens))[: cache.get_seq_length()]
                idle = Idle(Past.of(name, job.owner, job.about, ids), cache, settled=self.store is None)
                self._idle[name] = idle
                if self.store is not None:
                    self._write(self._save, idle, self.store)

    def _save(self, idle: Idle, store: Store) -> None:
        """Write a session's file, unless it has gone on already."""
        name = idle.past.name
        with self._changed:
            if self._idle.get(name) is not idle:
                return
            idle.saving = True
        try:
            store.save(idle.past, idle.cache)
        except Exception:  # the store has caught what a disk can do
            LOG.exception("a session could not be saved")
        with self._changed:
            idle.saving, idle.settled = False, True
            gone = name not in self._idle
            self._inbox.append(("saved", None))
            self._changed.notify()
        if gone:  # its document was deleted meanwhile
            store.remove(name)

    def _count(self, job: Job, text: Text) -> None:
        figures = self.figures
        if text.error is not None and not isinstance(text.error, ValueError):
            LOG.error("a request failed", exc_info=text.error)
        if text.error is not None:
            text.error.__traceback__ = None  # its frames hold the cache
        if job.inner:
            return
        figures.requests += 1
        figures.cancelled += text.finish_reason == "cancelled"
        figures.failed += text.finish_reason == "error"
        figures.prompt_tokens += len(job.ids)
        figures.cached_tokens += job.cached_tokens
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
