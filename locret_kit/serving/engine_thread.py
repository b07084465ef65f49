"""The engine's thread: it owns the model, and all requests share its forwards (see ``engine.Engine``).

Every session has one cache of fixed size, so the server's memory is planned before the start. At most ``sessions`` caches
exist, for running requests and for conversations that wait for their next turn. A prompt that starts with all tokens of a
waiting cache continues it, from memory or from its file. Waiting requests are admitted in order of arrival. A short one may
pass a long one within the bound of ``runtime.sequence``.
"""

from __future__ import annotations

import threading
from array import array
from collections import abc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..documents.conversation import common
from ..documents.document import Document, Progress
from ..documents.prefix_cache import pin_thoughts
from ..engine import BoundedCache, CacheFile, Engine, RetainingHeads, Sequence
from ..naming import prefixed_errors
from ..policies import Policy
from ..settings import RunSettings, Thoughts
from .admission import Admission
from .figures import Counters
from .request import LOG, Busy, Prompt, ServerRequest, Stopping
from .sessions import Sessions
from .store import SessionSpec, Store

PINNED_AHEAD = 32
"""Tokens of a thought that are pinned before they are written."""


class EngineThread:
    """Runs requests.

    Args:
        settings, policy, heads: of every session, unless a request says otherwise.
        published: settings that heads were published with, for those that ``settings`` leaves open.
        sessions: caches at once, running and idle. queue: requests that may wait for a cache. piece: see ``Engine``.
        store: saves sessions after each turn; None keeps them in memory alone.
        policies: others that requests and saved caches may have.
        thoughts: how they are kept or dropped, see ``runtime.thoughts``.
        shared_prefixes: shared prompt prefixes (system prompts) in memory at once. Each has a cache in addition to those of
            sessions. Each belongs to one owner, so that timing tells nobody about the prompts of others.
        document_budget: slots of a document, at most; those of a session where that is more, or None.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RunSettings, policy: Policy,
        heads: RetainingHeads | None, *,
        sessions: int = 8, queue: int = 64, piece: int = 512, store: Store | None = None, policies: abc.Sequence[Policy] = (),
        shared_prefixes: int = 2, thoughts: Thoughts = "evicted", document_budget: int | None = None,
        published: abc.Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self._asked, self._published = settings, published or {}
        resolved = settings.resolved(self._published, None)
        self._engine = Engine.shared(model, tokenizer, sessions, piece=piece, chunk=resolved.chunk)
        self.model, self.stop_ids, self.vocabulary = self._engine.model, self._engine.stop, self._engine.vocabulary
        self.tokenizer, self.settings, self.policy, self.heads = tokenizer, resolved.run, policy, heads
        self.sessions, self.queue, self.shared_prefixes, self.store = sessions, queue, shared_prefixes, store
        self.thoughts, self.document_budget = thoughts, max(resolved.budget, document_budget or 0)
        self.spec = SessionSpec(self.model, self.settings, heads, (policy, *policies), self.document_budget)
        self.counters = Counters()
        if store is not None:
            store.scan(self.spec)
        self._changed = threading.Condition()
        self._parked = Sessions(self.spec, store, self._changed)
        self._admission = Admission(
            self._engine, self._parked, self.counters, max_caches=sessions, max_prefixes=shared_prefixes
        )
        self._stopping = False
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="locret-engine", daemon=True)
        self._thread.start()

    def settings_for(self, budget: int) -> RunSettings:
        """Settings of a text with a budget of its own, which stabilizers and tail follow where nobody has set them."""
        return replace(self._asked, budget=budget).resolved(self._published, None).run

    def submit(self, *requests: ServerRequest) -> None:
        """Queue requests: all, or none.

        Raises:
            ValueError: more at once than may wait. Busy: too many wait. Stopping: the engine stops.
        """
        if len(requests) > self.queue:
            raise ValueError(f"{len(requests)} answers must be at most {self.queue}, the requests that may wait")
        with self._changed:
            if self._stopping:
                raise Stopping("the engine has ended with an error" if self.failed else "the server is stopping")
            waiting = len(self._admission.queue)
            if waiting + len(requests) > self.queue:
                self.counters.refused += len(requests)
                raise Busy(waiting)
            self._admission.queue += requests
            self._changed.notify_all()

    def cancel(self, request: ServerRequest) -> None:
        """Let a request leave, at whatever step it is. One that has ended waits for no lock."""
        if request.sequence is not None and request.sequence.finish_reason is not None:
            return
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def read(self, model: PreTrainedModel, ids: array[int], cache: BoundedCache, progress: Progress | None) -> None:
        """A ``documents.document.Reader``: read tokens into a cache, among the other requests. Blocks until it is done; waits
        while the queue is full, since whoever sent the document has left.

        Raises:
            Stopping: see ``submit``. Exception: as reading and ``progress`` raise.
        """
        done = threading.Event()

        def changed() -> None:
            if request.sequence is not None and request.sequence.finish_reason is not None:
                done.set()

        request = ServerRequest(Prompt(ids), owner="", purpose="document", on_change=changed, cache=cache)
        with self._changed:
            while len(self._admission.queue) >= self.queue and not self._stopping:
                if progress is not None:
                    progress(0, len(ids))
                self._changed.wait(0.2)
            self.submit(request)
        try:
            while not done.wait(0.2):
                if progress is not None:
                    progress(cache.get_seq_length(), len(ids))
        finally:  # where progress raises, the cache is free before this ends
            self.cancel(request)
            done.wait()
        assert request.sequence is not None
        if request.sequence.error is not None:
            raise request.sequence.error
        if request.sequence.finish_reason != "read":
            raise Stopping("the server is stopping")

    def stop(self, wait: float = 10.0) -> None:
        """End. Running requests have ``wait`` seconds, then all are cancelled. Unsaved sessions are saved."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(wait)
        with self._changed:
            for request in (*self._admission.queue, *self._admission.active):
                request.cancelled = True
            self._changed.notify_all()
        self._thread.join(max(wait, 10.0))  # a forward cannot be cut short
        self._parked.close()

    def load_document(self, path: Path) -> Document:
        """The document in a file. Raises OSError, ValueError as ``Document.load`` and ``SessionSpec.check``."""
        file = CacheFile.read(path)
        with prefixed_errors(str(path), ValueError):
            self.spec.check(file)
        policy = next((policy for policy in self.spec.policies if policy.name == file.saved.policy), None)
        return Document.load(file, self.model, self.tokenizer, self.heads, policy)

    def save_document(self, name: str, owner: str, document: Document) -> None:
        """Write a document's file, when there is a store, in the order of all files. Does not wait."""
        if self.store is not None:
            self._parked.write(self.store.save, name, owner, document.as_file)

    def forget(self, document_id: str) -> None:
        """Drop a document's file, and the waiting sessions about it. Running answers continue, in their own caches."""
        with self._changed:
            self._parked.forget(document_id)
            for request in (*self._admission.queue, *self._admission.active):
                request.forgotten = request.forgotten or request.document_id == document_id

    @property
    def figures(self) -> dict[str, int]:
        """Current counts by the names of ``request.GAUGES``, without the caches of documents."""
        with self._changed:
            return {
                "requests_running": len(self._engine.running), "requests_waiting": len(self._admission.queue),
                "sessions": self.sessions, "sessions_in_use": self._admission.caches,
                "sessions_idle": len(self._parked.parked), "beginnings": len(self._admission.prefixes),
            }  # fmt: skip

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # of the engine itself: whoever waits would wait for good
            LOG.exception("the engine has ended")
            with self._changed:
                self._stopping = self.failed = True
                active, waiting = self._admission.active, list(self._admission.queue)
                for request in waiting:
                    self._admission.leave(request, "error", error)
                self._admission.active = []
            for request in (*active, *waiting):
                if request.sequence is not None and request.sequence.finish_reason is None:
                    request.sequence.end("error", error)
                with suppress(RuntimeError):  # the event loop of its request is closed
                    request.on_change()

    def _work(self) -> None:
        while self._admitted(wait=True):
            with self._engine.attached():
                self._step()
                while self._admitted(wait=False):
                    self._step()

    def _admitted(self, *, wait: bool) -> bool:
        """Whether a request runs, now that those with room were admitted; waits for one, or for the end."""
        with self._changed:
            while True:
                for request in [request for request in self._admission.active if request.cancelled]:
                    assert request.sequence is not None
                    self._engine.cancel(request.sequence)
                    self._notify(request)  # now: the next step counts on its cache
                for request in self._admission.admit():
                    self._notify(request)
                if self._engine.running:
                    return True
                if not wait or (self._stopping and not self._admission.queue):
                    return False
                self._changed.wait()

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # of one text or one forward, the batch has caught it already
            LOG.exception("a step failed")
            self._engine.fail(error)
        self.counters.forwards += 1
        for request in list(self._admission.active):
            self._notify(request)

    def _notify(self, request: ServerRequest) -> None:
        """Notify a request of a change, and release it after its end."""
        sequence, cache = request.sequence, request.cache
        assert sequence is not None
        try:
            tokens = request.stop_at(sequence.written) if sequence.written else None
            if cache is not None and cache.layers:
                request.evictions, request.kept_rows = cache.counters.evictions, max(cache.kept_rows)
                self._update_thoughts(request, cache, sequence)
                if request.search is not None and sequence.written and not request.search.begun:
                    request.search.begin(cache)
            if tokens is not None:
                self._engine.cancel(sequence, "stop")
                if cache is not None and (more := cache.get_seq_length() - request.prompt_length - tokens) > 0:
                    cache.take_back(more)  # the next turn begins with the answer as it was shown
        except Exception as error:
            self._engine.fail(error, [sequence])
        if sequence.finish_reason is not None:
            self._release(request, sequence)
        try:
            request.on_change()
        except RuntimeError:  # the event loop of its request is closed
            request.cancelled = True

    def _release(self, request: ServerRequest, sequence: Sequence) -> None:
        """Count a request that has ended, and have its cache wait for the next turn."""
        self.counters.count(request, sequence)
        with self._changed:
            if request in self._admission.active:
                self._admission.active.remove(request)
            if request.search is not None and request.cache is not None:
                request.search.end(request.cache)
            cache, reusable = request.cache, request.reusable and self._goes_on(sequence, request.cache)
            if request.drops_thoughts:
                cache, reusable = request.next_cache, request.reusable
            ended = cache is None or cache.state.unfinished or bool(cache.reread_positions)
            if reusable and cache is not None and not ended and cache.context.description.in_pieces:
                read = request.read(
                    cache.get_seq_length(), lambda token: not str(self.tokenizer.decode([token])).strip()
                )
                self._parked.park(request, cache, read)
            request.cache = request.next_cache = request.document = None

    def _goes_on(self, sequence: Sequence, cache: BoundedCache | None) -> bool:
        """Whether the cache of an answer that has ended may go on: also where its client left, from what was written or, for
        whoever asks again, from what was read."""
        if cache is None or sequence.finish_reason != "cancelled" or sequence.written:
            return sequence.finish_reason in ("stop", "length", "cancelled")
        return cache.get_seq_length() > 0 and not (self._stopping or cache.state.needs_reread)

    def _update_thoughts(self, request: ServerRequest, cache: BoundedCache, sequence: Sequence) -> None:
        """Copy the cache where thoughts are dropped, up to the last boundary before which later prompts evict alike. Where they
        are pinned, pin the thought so far and some tokens that follow."""
        prompt, tokens, ended = request.prompt, len(sequence.written), sequence.finish_reason is not None
        drops = request.drops_thoughts and request.reusable and not request.lookup.skipped
        shared = common(prompt.ids, prompt.next_ids) if drops else 0
        if shared and cache.get_seq_length() == cache.schedule.safe(shared):
            request.next_cache = None  # before another is made
            request.next_cache = cache.fork(request.prompt_length)
        if self.thoughts == "pinned" and (tokens % PINNED_AHEAD == 1 or ended):
            begin, ahead = request.prompt_length, 0 if ended else PINNED_AHEAD
            before = cache.schedule.prompt_length or 0
            earlier = [span for span in cache.pins if before <= span[0] < begin]
            pin_thoughts(cache, begin, [(start, end + ahead) for start, end in request.thought_spans()], earlier)
