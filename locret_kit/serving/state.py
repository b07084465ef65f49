"""State that requests share: the engine, the keys, items of answers, and the documents of their owners."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BytesIO
from threading import Event
from typing import TypeVar

from fastapi import HTTPException, Request

from ..documents.document import Document
from ..naming import first_line
from ..text.reader import Late, convert, is_converted, read_stream
from .engine_thread import EngineThread
from .figures import Figures
from .messages import Refused, nested
from .request import LOG

MAX_CHARACTERS = 4 << 20
"""Characters of an owner's items in memory, at most: of more, those that were made first are forgotten."""


class AnswerItems:
    """Items of answers by their ids, in memory and apart for each owner: a request may name one instead of sending it again
    (OpenAI's ``item_reference``)."""

    def __init__(self) -> None:
        self._owners: defaultdict[str, OrderedDict[str, str]] = defaultdict(OrderedDict)

    def add(self, owner: str, items: Iterable[Mapping[str, object]]) -> None:
        """Remember items."""
        mine = self._owners[owner]
        mine.update((str(item["id"]), json.dumps(item)) for item in items)
        size = sum(map(len, mine.values()))
        while size > MAX_CHARACTERS:
            size -= len(mine.popitem(last=False)[1])

    def resolved(self, owner: str, given: object) -> object:
        """A request's input, with items in place of their references.

        Raises:
            Refused: 404, an item is not here.
        """
        mine, items = self._owners[owner], list(given) if isinstance(given, list) else []
        for number, item in enumerate(items):
            if nested(item, "type") == "item_reference":
                name = str(nested(item, "id"))
                if name not in mine:
                    said = "is not here, or not any more: send the item itself, as clients do with store=false"
                    raise Refused(404, f"input.{number}: item_reference {name[:64]!r} {said}", "input")
                items[number] = json.loads(mine[name])
        return items or given


T = TypeVar("T")
SHORT, LONG = 4, 60
"""Seconds of processor time of a conversion, in the first lane and in the second."""


@dataclass(frozen=True)
class Limits:
    """Bounds that every request meets before any work."""

    prompt_tokens: int = 131072
    answer_tokens: int = 4096
    body_bytes: int = 8 << 20
    """Bytes of a JSON body, at most."""
    upload_bytes: int = 64 << 20
    documents: int = 8
    """Documents in memory, of all owners."""
    body_seconds: float = 60.0
    """Seconds from the first byte of a JSON body to its last."""
    strict: bool = False
    """Whether a request for more tokens than ``answer_tokens`` is refused."""
    upload_seconds: float = 600.0


@dataclass
class UploadedDocument:
    """A document of an owner, ready or still being read."""

    id: str
    owner: str
    title: str
    created: int
    document: Document | None = None
    read: int = 0
    total: int = 0
    error: str | None = None
    lost: list[str] = field(default_factory=list)
    """Content of its file that its text lacks, one line each."""
    deleted: bool = False
    """While it is still being read, its memory counts."""

    def shown(self) -> dict[str, object]:
        """Fields of the document in the protocol."""
        held = self.document
        read, total = (self.read, self.total) if held is None else (held.tokens, held.tokens)
        status = "failed" if self.error else "ready" if held is not None else "reading"
        shown = {
            "id": self.id, "object": "document", "created_at": self.created, "title": self.title, "status": status,
            "read_tokens": read, "total_tokens": total, "error": self.error, "lost": self.lost,
            "bytes": None if held is None else held.cache.nbytes,
        }  # fmt: skip
        return {name: value for name, value in shown.items() if value not in (None, "", [])}


@dataclass
class Server:
    """Everything that requests share."""

    engine: EngineThread | None
    name: str
    keys: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    """Policies that a request may ask for."""
    limits: Limits = field(default_factory=Limits)
    hosts: frozenset[str] = frozenset()
    """Names of the server besides loopback's and its address; they matter only without keys."""
    origins: frozenset[str] = frozenset()
    """Origins whose pages may use it; '*' for all."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling where a request does not say, by the names of ``bodies.DEFAULTS``."""
    silence: float = 5.0
    """Seconds without a byte of an answer, at most, while its client waits."""
    started: int = field(default_factory=lambda: int(time.time()))
    documents: dict[str, UploadedDocument] = field(default_factory=dict)
    """Documents by their ids. Several threads change it, so it is copied before it is looped over."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    readers: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, None, "locret-document"))
    """Threads that wait for documents, apart from those that answers need."""
    lanes: defaultdict[tuple[str, ...], asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Two files at a time, one in each lane, so that the memory of conversions is that of two."""
    items: AnswerItems = field(default_factory=AnswerItems)
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Salt of the owners' names."""
    ended: Event = field(default_factory=Event)
    """Set when it stops."""

    @cached_property
    def owners(self) -> dict[bytes, str]:
        """The owner's name of each key, by the key's hash; without keys all callers are one owner."""
        return {hashlib.sha256(key.encode()).digest(): owner_of(key, self.salt) for key in self.keys or ("",)}

    async def in_turn(self, lane: str, owner: str, act: Callable[[], T]) -> T:
        """Run ``act`` in a thread of ``readers`` and return its result. A lane runs one at a time. Of an owner's, one at a time
        waits for it among those of others."""
        async with self.lanes[lane, owner], self.lanes[lane,]:
            return await asyncio.get_running_loop().run_in_executor(self.readers, act)

    async def text_of(self, data: bytes, upload: UploadedDocument) -> str:
        """The text of an upload as ``text.reader.convert`` gives it. Plain text, which needs no parser, waits for nobody. A file
        that takes longer than ``SHORT`` in the first lane begins again in the second, so that none keeps others waiting."""
        name, lines = upload.title, list[str]()
        if not is_converted(name, data[:8]):
            plain = partial(read_stream, BytesIO(data), name, lost=upload.lost.append)
            return await asyncio.get_running_loop().run_in_executor(self.readers, plain)
        made = partial(convert, data, name, unwanted=lambda: upload.deleted, lost=lines.append)
        try:
            text = await self.in_turn("short", upload.owner, partial(made, seconds=SHORT))
        except Late:
            text = await self.in_turn("long", upload.owner, partial(made, seconds=LONG))
        upload.lost += lines
        return text

    def ready(self) -> EngineThread:
        """The engine. Raises HTTPException 503 while it is loading."""
        if self.engine is None:
            raise HTTPException(503, "the model is being loaded")
        return self.engine

    def owner(self, request: Request) -> str:
        """Owner of a request: a salted hash of its key in ``Authorization``, else in ``x-api-key``. Raises HTTPException 401."""
        if not self.keys:
            return next(iter(self.owners.values()))
        scheme, _, key = request.headers.get("authorization", "").partition(" ")  # the scheme's case is nobody's
        # Anthropic's clients send both where both are set up; a proxy's own password may stand in the first.
        given = (key if scheme.lower() == "bearer" else scheme, request.headers.get("x-api-key", ""))
        digests = [hashlib.sha256(one.encode("latin-1")).digest() for one in given]
        known = [name for digest in digests for key, name in self.owners.items() if hmac.compare_digest(digest, key)]
        if not known:  # every key was compared, by its hash: equal time, whatever its length
            raise HTTPException(401, "the API key is missing or wrong")
        return known[0]

    def figures(self) -> Figures:
        """Text of ``/metrics`` now. Raises HTTPException 503."""
        engine = self.ready()
        now = {**engine.figures, "documents": self.places}
        if (store := engine.store) is not None:
            now |= {"session_disk_bytes": store.bytes, "session_disk_failing": int(store.failing is not None)}
            now |= {"saved_files": store.written, "save_failures": store.failures}
        return Figures(engine.counters, now)

    def document(self, owner: str, name: str) -> UploadedDocument:
        """An owner's document. Raises HTTPException 404, for another owner's too."""
        upload = self.documents.get(name)
        if upload is None or upload.owner != owner or upload.deleted:
            raise HTTPException(404, f"document {name[:64]!r} is not there")
        return upload

    def ready_document(self, owner: str, name: str) -> Document:
        """An owner's document, read. Raises HTTPException 404; 409 while it is being read."""
        upload = self.document(owner, name)
        if upload.document is None:
            raise Refused(409, f"document {upload.id} is {upload.shown()['status']}", "document_id")
        if self.engine is not None and self.engine.store is not None:
            self.engine.store.used(name)
        return upload.document

    def document_of(self, request: Request, name: str | None) -> Document | None:
        """The document that a request is about; None for none. Errors as ``ready_document``."""
        return None if name is None else self.ready_document(self.owner(request), name)

    @property
    def places(self) -> int:
        """Documents that have a place: all but those that failed."""
        return sum(upload.error is None for upload in list(self.documents.values()))

    def stop(self, grace: float = 10.0) -> None:
        """End: documents that are being read at once, answers that are being written after ``grace`` seconds."""
        LOG.info("stopping: answers that run have %g s", grace)
        self.ended.set()
        for upload in list(self.documents.values()):
            upload.deleted |= upload.document is None
        if self.engine is not None:
            self.engine.stop(grace)
        self.readers.shutdown(wait=False, cancel_futures=True)

    def restore(self, engine: EngineThread) -> None:
        """Load documents that are on disk, as many as there may be, those first that were used last. No request comes yet."""
        left = 0
        for name, file in engine.store.documents({*self.owners.values()}) if engine.store else ():
            if self.places >= self.limits.documents:
                left += 1
                continue
            try:
                document = engine.load_document(file.path)
            except (OSError, ValueError) as error:  # such as another chat template: a server that has it may come back
                LOG.warning("a document's file cannot be used, and is left as it is: %s", first_line(error))
                continue
            owner, title = file.path.parent.name, document.title or "document"
            self.documents[name] = UploadedDocument(name, owner, title, file.created, document)
        if left:
            LOG.warning("%d documents stay on disk: documents=%d are held at once", left, self.limits.documents)

    def listed(self, owner: str) -> list[dict[str, object]]:
        """An owner's documents."""
        return [one.shown() for one in list(self.documents.values()) if one.owner == owner and not one.deleted]


def owner_of(key: str, salt: bytes) -> str:
    """The name of a key's owner: a salted hash that is slow to guess."""
    return hashlib.scrypt(key.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=16).hex()
