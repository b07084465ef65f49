"""A request on its way through the engine, what caches have read of its prompt, and why the engine may refuse it."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from itertools import dropwhile
from typing import Any, Literal

from ..documents.document import Document, EvidenceSearch
from ..engine import BoundedCache, Request, Sampling, Sequence, Thought
from ..policies import Policy
from ..settings import RunSettings
from ..text.tokens import hash_ids
from ..text.untrusted import Span

LOG = logging.getLogger("locret_kit.serving")


@dataclass(frozen=True)
class PrefixKey:
    """A session and the tokens that it has read."""

    name: str
    owner: str
    document_id: str
    """The document that the session continues; '' for none."""
    tokens: int
    sha256: str
    """Hash of the token ids, see ``documents.document_text``."""
    skipped: int = 0
    """Tokens of thoughts that it has read in addition. Chat templates omit them from later prompts."""

    @classmethod
    def from_record(cls, name: str, owner: str, record: dict[str, Any]) -> tuple[PrefixKey, ...]:
        """The keys that a session's file holds. Raises ValueError."""
        document, keys = record.get("about"), record.get("keys", ())
        with suppress(TypeError):
            made = tuple(cls(name, owner, document, *key) for key in keys if isinstance(document, str))
            if made and all((type(one.tokens), type(one.sha256), type(one.skipped)) == (int, str, int) for one in made):
                return made
        raise ValueError(f"{name} is no session")

    @classmethod
    def record(cls, keys: tuple[PrefixKey, ...]) -> dict[str, object]:
        """Record of the keys in a session's file."""
        return {"about": keys[0].document_id, "keys": [[key.tokens, key.sha256, key.skipped] for key in keys]}


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was sent, and what other prompts have of it.

    Attributes:
        shared_tokens: first tokens that other prompts may share.
        next_ids: the ids up to its answer, as the next turn's prompt has them.
        opened: whether it begins a thought of the answer.
    """

    ids: array[int]
    shared_tokens: int = 0
    next_ids: array[int] = field(default_factory=lambda: array("i"))
    opened: bool = False

    @cached_property
    def hash(self) -> Callable[[int], str]:
        """The hash of the first so many ids, each computed once."""
        return cache(lambda tokens: hash_ids(self.ids[:tokens]))

    def longest(self, keys: Iterable[PrefixKey], owner: str, document_id: str) -> PrefixKey | None:
        """The longest key of an owner's caches about a document, with tokens that are a proper prefix of the prompt."""
        mine = (key for key in keys if key.owner == owner and key.document_id == document_id)
        shorter = sorted((key for key in mine if key.tokens < len(self.ids)), key=lambda key: -key.tokens)
        return next((key for key in shorter if self.hash(key.tokens) == key.sha256), None)


@dataclass(frozen=True)
class AnswerSpec:
    """What a body asks of each of its answers, within the server's bounds.

    Attributes:
        max_new_tokens: of the answer, at most. thought_tokens: of its thought; None for no bound of its own.
        apart: whether the thought's tokens are beside the answer's.
        stops: texts that end an answer.
        echoes: whether the prompt is a part of the answer. hides_thoughts: whether the client gets none.
        must_call: whether it must call a tool.
        settings, policy: of its own; None for the server's. evidence: whether it comes with passages of its document; its cache
            then sums up attention, and waits for no next turn.
    """

    max_new_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    thought_tokens: int | None = None
    apart: bool = False
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    echoes: bool = False
    hides_thoughts: bool = False
    must_call: bool = False
    settings: RunSettings | None = None
    policy: Policy | None = None
    evidence: bool = False

    @property
    def max_tokens(self) -> int:
        """Tokens of the answer and its thought, at most."""
        return self.max_new_tokens + (self.thought_tokens or 0) * self.apart

    @property
    def prompt_logprobs(self) -> bool:
        """Whether the prompt's tokens come with their log-probabilities."""
        return self.echoes and self.top_logprobs is not None

    @property
    def is_default(self) -> bool:
        """Whether it runs as the server is set, so that its cache fits other requests."""
        own = self.settings is not None or self.policy is not None
        return not (own or self.prompt_logprobs or self.evidence)


@dataclass
class SessionLookup:
    """The search for the session that a request continues.

    Attributes:
        name: of the session; '' for a new one. skipped: tokens of thoughts that it has read and the prompt omits.
        loading: whether it is being read from its file. Its cache counts already. load_tries: times that one was.
        file, store_version: the session's file, and the store's version when it was looked for.
    """

    name: str = ""
    skipped: int = 0
    loading: bool = False
    load_tries: int = 0
    file: PrefixKey | None = None
    store_version: int | None = None


class Stopping(RuntimeError):
    """The engine is stopping: it takes no requests, and running ones are cancelled."""


class Busy(Exception):
    """The queue is full. ``retry_after``: seconds until another try makes sense."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait already")
        self.retry_after = max(1, waiting)


@dataclass(eq=False)
class ServerRequest:
    """One answer on its way from the queue to its end.

    Attributes:
        owner: whose caches it may continue.
        purpose: an answer for a client, a document to read, or a shared prefix to read.
        document, document_id: the document that the prompt continues, and its id. The engine releases the document when the
            request has its own copy.
        thought: watches the answer's thought. drops_thoughts: whether the cache for the next turn has none.
        on_change: called by the engine's thread after every token and at the end; must not block.
        stop_at: called by the engine's thread after every token. If it returns a number, the answer ends with that many tokens.
        thought_spans: half-open spans of the answer's tokens that are thoughts, so far.
        cache: given with the request, read from a file, or made on admission; None again at the end.
        search: for evidence, once a document's cache is there.
        next_cache: the cache that will wait for the next turn, if it is not the answer's own.
        sequence: the batch's record of it; None while it waits.
        cancelled: whether it is to end; the engine's thread ends it. forgotten: whether its cache may not wait for a next turn.
        prefix_read: tokens of a shared prefix that was read because of this request.
        evictions, kept_rows: of its cache, after the newest token.
        submitted: its arrival, in seconds of ``time.perf_counter``.
    """

    prompt: Prompt
    spec: AnswerSpec = field(default_factory=AnswerSpec)
    _: KW_ONLY
    owner: str
    purpose: Literal["answer", "document", "prefix"] = "answer"
    document: Document | None = None
    document_id: str = ""
    thought: Thought | None = None
    drops_thoughts: bool = False
    on_change: Callable[[], None] = lambda: None
    stop_at: Callable[[list[int]], int | None] = lambda tokens: None
    thought_spans: Callable[[], list[Span]] = list
    cache: BoundedCache | None = None
    search: EvidenceSearch | None = None
    next_cache: BoundedCache | None = None
    lookup: SessionLookup = field(default_factory=SessionLookup)
    sequence: Sequence | None = None
    cancelled: bool = False
    forgotten: bool = False
    prefix_read: int = 0
    evictions: int = 0
    kept_rows: int = 0
    submitted: float = field(default_factory=time.perf_counter)

    def for_engine(self) -> Request:
        """The request as the engine reads it, with a placeholder for each token of a thought that its cache has read."""
        prompt, spec = self.prompt.ids, self.spec
        return Request(
            prompt[:1] * self.lookup.skipped + prompt, spec.max_new_tokens, spec.sampling, spec.seed,
            top_logprobs=spec.top_logprobs, prompt_logprobs=spec.prompt_logprobs, thought=self.thought,
        )  # fmt: skip

    @property
    def prompt_length(self) -> int:
        """Tokens before the answer, in its cache."""
        return len(self.prompt.ids) + self.lookup.skipped

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        known = self.sequence.prompt_read if self.sequence is not None else 0
        return max(0, known - self.prefix_read - self.lookup.skipped)

    @property
    def reusable(self) -> bool:
        """Whether its cache may wait for a next turn."""
        asks = self.purpose == "answer" and self.spec.max_new_tokens > 0
        return asks and self.spec.is_default and not self.forgotten

    def read(self, tokens: int, blank: Callable[[int], bool]) -> Iterator[tuple[array[int], int]]:
        """Prompt prefixes that may continue a cache with ``tokens`` read tokens, each with the number of thought tokens that
        it omits. The first is the prompt with its answer. The second is its form in the next turn's prompt, without leading
        ``blank`` tokens of the answer."""
        assert self.sequence is not None
        answer, skipped, next_ids = self.sequence.written, self.lookup.skipped, self.prompt.next_ids
        answer = answer[: max(0, tokens - self.prompt_length)]
        yield (self.prompt.ids + array("i", answer))[: tokens - skipped], skipped
        if answer and next_ids:
            answer = answer[max((end for _, end in self.thought_spans()), default=0) :]
            answer = [*dropwhile(blank, answer)]
            same = (size for size in range(len(answer), 0, -1) if next_ids[-size:].tolist() == answer[:size])
            shorter = next_ids + array("i", answer[next(same, 0) :])
            if answer and tokens >= len(shorter):  # after a thought alone the same prompt again would continue it
                yield shorter, tokens - len(shorter)
