"""A request on its way through the engine, what caches have read of its prompt, and why the engine may refuse it."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from typing import Literal

from ..cache.bounded import BoundedCache
from ..documents.document import Document
from ..documents.document_text import hash_ids
from ..policies import Policy
from ..runtime.sequence import Request, Sequence
from ..settings import RunSettings

LOG = logging.getLogger("locret_kit.serving")


@dataclass(frozen=True)
class PrefixKey:
    """A session, and what it has read."""

    name: str
    owner: str
    document_id: str
    """The document that it goes on from; '' for none."""
    tokens: int
    sha256: str
    """Hash of the token ids, see ``documents.document_text``."""

    @classmethod
    def of(cls, name: str, owner: str, document_id: str, ids: array[int]) -> PrefixKey:
        """The key of a session that has read ``ids``."""
        return cls(name, owner, document_id, len(ids), hash_ids(ids))

    @classmethod
    def from_record(cls, name: str, owner: str, record: dict[str, object]) -> PrefixKey:
        """The key that a session's file holds. Raises ValueError."""
        document, tokens, digest = (record.get(field) for field in ("about", "tokens", "sha256"))
        right = isinstance(document, str) and type(tokens) is int and isinstance(digest, str) and len(record) == 3
        if not right:
            raise ValueError(f"{name} is no session")
        return cls(name, owner, str(document), int(str(tokens)), str(digest))


class PrefixHashes:
    """Hashes of a prompt's beginnings, each made once."""

    def __init__(self, ids: array[int]) -> None:
        self._ids, self.hash = ids, cache(lambda tokens: hash_ids(ids[:tokens]))
        """The hash of the first ``tokens`` ids."""

    def longest(self, keys: Iterable[PrefixKey], owner: str, document_id: str) -> PrefixKey | None:
        """The longest of what an owner's caches have read about a document that the prompt begins with and goes on from."""
        mine = (key for key in keys if key.owner == owner and key.document_id == document_id)
        shorter = sorted((key for key in mine if key.tokens < len(self._ids)), key=lambda key: -key.tokens)
        return next((key for key in shorter if self.hash(key.tokens) == key.sha256), None)


class Stopping(RuntimeError):
    """The engine takes nothing more, and what ran is cancelled."""


class Busy(Exception):
    """The queue is full. ``retry_after``: seconds after which another try makes sense."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait already")
        self.retry_after = max(1, waiting)


@dataclass(eq=False)
class ServerRequest(Request):
    """One prompt from the body to the answer.

    Attributes:
        owner: whose caches it may go on with.
        purpose: an answer for a client; else what is read: a document, or a prefix that prompts share.
        document, document_id: the document that the prompt goes on from, and its id. The engine lets go of the document when
            the request has its own copy.
        settings, policy: of its own; None for the server's.
        shared_tokens: tokens with which other prompts may begin too.
        parks: whether the cache may wait for a next turn.
        on_change: called by the engine's thread after every token and at the end; must not block.
        stop_at: asked by the engine's thread after every token; the answer ends where it says how many of its tokens stay.
        sequence: what the batch knows of it; None while it waits.
        cache: given with the request, read from a file, or made when it enters; None again at the end.
        session: name of the session that it goes on; '' for a new one.
        cancelled: whether it is to end; the engine's thread ends it.
        loading: whether its session is being read from its file, into a cache that counts already.
        file, store_version: the session's file that was found for it, and the version of the store in which.
        loads: times that a session was read from its file for it.
        prefix_read: tokens of a shared prefix that was read because of this request.
        evictions, kept_rows: of its cache, after the newest token.
        submitted: when it came, in seconds of ``time.perf_counter``.
    """

    ids: array[int]
    _: KW_ONLY
    owner: str
    purpose: Literal["answer", "document", "prefix"] = "answer"
    document: Document | None = None
    document_id: str = ""
    settings: RunSettings | None = None
    policy: Policy | None = None
    shared_tokens: int = 0
    parks: bool = True
    on_change: Callable[[], None] = field(default=lambda: None)
    stop_at: Callable[[list[int]], int | None] | None = None
    sequence: Sequence | None = None
    cache: BoundedCache | None = None
    session: str = ""
    cancelled: bool = False
    loading: bool = False
    file: PrefixKey | None = None
    store_version: int | None = None
    loads: int = 0
    prefix_read: int = 0
    evictions: int = 0
    kept_rows: int = 0
    submitted: float = field(default_factory=time.perf_counter)

    @cached_property
    def prefixes(self) -> PrefixHashes:
        """Hashes of the prompt's beginnings."""
        return PrefixHashes(self.ids)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        return max(0, self.sequence.prompt_read - self.prefix_read) if self.sequence is not None else 0

    @property
    def has_defaults(self) -> bool:
        """Whether it runs as the server is set, so that its cache fits other requests."""
        return self.settings is None and self.policy is None and not self.prompt_logprobs
