"""What the engine carries: requests on their way through it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..cache.bounded import BoundedCache
from ..documents.document import Document
from ..policies.policy import Policy
from ..runtime.batch import Text
from ..runtime.session import Sampling
from ..settings import RunSettings
from .past import Prefixes


class Stopping(RuntimeError):
    """The engine takes nothing more, and what ran is cancelled."""


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
    loads: int = 0
    """Times that a session was read from its file for it."""
    cancelled: bool = False
    """Whether it is to end; the engine's thread ends it."""
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
