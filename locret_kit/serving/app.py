"""OpenAI's protocol over the engine: models, completions, documents, health, metrics.

Prompts and answers are never logged. Every document and every cache belongs to the key with which it was made.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import shutil
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, BinaryIO
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel

from ..cache.bounded import BoundedCache
from ..documents.document import Document, Progress
from ..naming import first_line
from ..policies.base import Policy
from ..policies.grammar import parse_policy
from .bodies import ChatBody, Generation, TextBody
from .convert import Unwanted, convert
from .engine import Busy, Engine, Job, Stopping
from .metrics import metrics_of
from .page import add_page, kept_page
from .store import owner_of

LOG = logging.getLogger("locret_kit.serving")


@dataclass(frozen=True)
class Limits:
    """Bounds that every request meets before any work."""

    prompt_tokens: int = 131072
    answer_tokens: int = 4096
    body_bytes: int = 8 << 20
    """Of a JSON body."""
    upload_bytes: int = 64 << 20
    documents: int = 8
    """Documents in memory, of all owners."""
    body_seconds: float = 60.0
    """From the first byte of a JSON body to its last."""
    upload_seconds: float = 600.0


@dataclass
class Held:
    """A document of an owner."""

    id: str
    owner: str
    title: str
    created: int
    document: Document | None = None
    read: int = 0
    total: int = 0
    error: str | None = None
    deleted: bool = False
    """While it is still being read, its memory counts."""

    def shown(self) -> dict[str, object]:
        """As the protocol has it."""
        status = "failed" if self.error else "ready" if self.document is not None else "reading"
        shown: dict[str, object] = {
            "id": self.id, "object": "document", "created_at": self.created, "title": self.title, "status": status,
            "read_tokens": self.read, "total_tokens": self.total,
        }  # fmt: skip
        if self.error:
            shown["error"] = self.error
        if self.document is not None:
            cache = self.document.cache
            shown |= {"total_tokens": self.document.tokens, "read_tokens": self.document.tokens, "bytes": cache.nbytes}
        return shown


@dataclass
class Server:
    """Everything that requests share."""

    engine: Engine | None
    name: str
    keys: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    """Policies that a request may ask for."""
    limits: Limits = field(default_factory=Limits)
    documents: dict[str, Held] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(thread_name_prefix="locret-document")
    )
    """Threads that wait for documents, apart from those that answers need."""
    converting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One file at a time, so that the memory of a conversion is that of one."""
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Of the owners' names."""

    @cached_property
    def owners(self) -> dict[bytes, str]:
        """The owner's name of each key, by the key's hash; without keys all callers are one owner."""
        return {hashlib.sha256(key.encode()).digest(): owner_of(key, self.salt) for key in self.keys or ("",)}

    def ready(self) -> Engine:
        """The engine. Raises HTTPException 503 while it is loading."""
        if self.engine is None:
            raise HTTPException(503, "the model is being loaded")
        return self.engine

    def owner(self, request: Request) -> str:
        """Who asks, as a salted hash of the key. Raises HTTPException 401."""
        if not self.keys:
            return next(iter(self.owners.values()))
        given = request.headers.get("authorization", "").encode("latin-1").removeprefix(b"Bearer ")
        digest = hashlib.sha256(given).digest()
        known = [owner for key, owner in self.owners.items() if hmac.compare_digest(digest, key)]
        if not known:  # every key was compared, by its hash: equal time, whatever its length
            raise HTTPException(401, "the API key is missing or wrong")
        return known[0]

    def held(self, owner: str, name: str) -> Held:
        """An owner's document. Raises HTTPException 404, for another owner's too."""
        found = self.documents.get(name)
        if found is None or found.owner != owner or found.deleted:
            raise HTTPException(404, f"document {name[:64]!r} is not there")
        return found

    def restore(self, engine: Engine) -> None:
        """Load the documents that an earlier server saved, as many as there may be, those first that were used last."""
        left = 0
        for name, owner, created, path in engine.store.documents({*self.owners.values()}) if engine.store else ():
            if len(self.documents) >= self.limits.documents:
                left += 1
                continue
            try:
                document = engine.load_document(path)
            except (ValueError, OSError) as error:
                LOG.warning("a document's file is not usable and removed: %s", first_line(error))
                engine.forget(name)
                continue
            self.documents[name] = Held(name, owner, document.title or "document", created, document)
        if left:
            LOG.warning("%d documents stay on disk: documents=%d are held at once", left, self.limits.documents)


class Guard:
    """Refuse, before a body is held: a request without a key, and bodies beyond a size, with or without a Content-Length, or
    slower than a time.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limits, upload = self.server.limits, scope["path"].startswith("/v1/documents")
        most = limits.upload_bytes if upload else limits.body_bytes
        seconds = limits.upload_seconds if upload else limits.body_seconds
        had, whole, answered = 0, False, False
        end = time.monotonic() + seconds

        async def bounded() -> Message:
            nonlocal had, whole
            if whole:  # what comes now is that the client goes
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except TimeoutError:
                raise Refused(408, f"the body took more than {seconds:g} s") from None
            had, whole = had + len(message.get("body", b"")), not message.get("more_body", False)
            if had > most:
                raise Refused(413, f"the body must be at most {most} bytes")
            return message

        async def noting(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            if scope["path"].startswith(("/v1/", "/metrics")):
                self.server.owner(Request(scope))
            length = next((int(v) for k, v in scope["headers"] if k == b"content-length" and v.isdigit()), 0)
            if length > most:
                raise Refused(413, f"the body must be at most {most} bytes")
            await self.app(scope, bounded, noting)
        except HTTPException as error:
            if not answered:
                await problem(error.status_code, str(error.detail), headers={"connection": "close"})(
                    scope, receive, send
                )


class Refused(HTTPException):
    """A body that is not read to its end."""


KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def problem(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in OpenAI's shape."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    return JSONResponse(body, status, headers)


def make_app(server: Server, start: Callable[[], Awaitable[None]] | None = None) -> FastAPI:
    """The application. ``start`` loads the model, while ``/health`` says 503."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(start()) if start is not None else None
        yield
        if loading is not None:
            loading.cancel()
        for held in server.documents.values():
            held.deleted = True  # those that are being read end
        if server.engine is not None:
            await asyncio.to_thread(server.engine.stop)
        server.readers.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="locret-serve", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, server=server)

    @app.middleware("http")
    async def identify(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        name, began = f"req_{secrets.token_hex(8)}", time.perf_counter()
        response = await call(request)
        response.headers["x-request-id"] = name
        LOG.info(
            "%s %s %s %d %.2fs",
            name,
            request.method,
            quote(request.url.path),  # no line ends
            response.status_code,
            time.perf_counter() - began,
        )
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or None
        return problem(400, f"{where}: {first['msg']}" if where else str(first["msg"]), where)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail))

    @app.exception_handler(404)
    async def missing(request: Request, error: Exception) -> JSONResponse:
        return problem(404, str(getattr(error, "detail", f"{request.url.path} is not there")))

    @app.exception_handler(ValueError)
    async def wrong(request: Request, error: ValueError) -> JSONResponse:
        return problem(400, first_line(error))

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> JSONResponse:
        return problem(429, str(error), headers={"retry-after": str(error.retry_after)})

    @app.exception_handler(Stopping)
    async def stopping(request: Request, error: Stopping) -> JSONResponse:
        return problem(503, str(error))

    @app.exception_handler(Failed)
    async def failed(request: Request, error: Failed) -> JSONResponse:
        return problem(500, str(error))

    @app.get("/health")
    async def health() -> JSONResponse:
        ready = server.engine is not None
        return JSONResponse({"status": "ok" if ready else "loading"}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> PlainTextResponse:
        server.owner(request)
        return PlainTextResponse(
            metrics_of(server.ready(), len(server.documents)), media_type="text/plain; version=0.0.4"
        )

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, object]:
        server.owner(request)
        return {
            "object": "list",
            "data": [{"id": server.name, "object": "model", "created": 0, "owned_by": "locret_kit"}],
        }

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await complete(server, request, body, "chat.completion")

    @app.post("/v1/completions")
    async def completion(body: TextBody, request: Request) -> Response:
        return await complete(server, request, body, "text_completion")

    @app.post("/v1/documents")
    async def upload(file: UploadFile, request: Request) -> Response:
        owner, engine = server.owner(request), server.ready()
        saved = (file.filename or "").lower().endswith(SAVED)
        data: bytes | Path = await asyncio.to_thread(aside, file.file) if saved else await file.read()
        if len(server.documents) >= server.limits.documents:  # after the last await: two uploads cannot both pass
            discard(data)
            said = f"{len(server.documents)} documents are held already: delete one first"
            return problem(429, said, headers={"retry-after": "60"})
        held = Held(f"doc_{secrets.token_hex(16)}", owner, (file.filename or "document")[:200], int(time.time()))
        server.documents[held.id] = held
        task = asyncio.create_task(read_document(server, engine, held, data))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)
        return JSONResponse(held.shown(), 202)

    @app.get("/v1/documents")
    async def documents(request: Request) -> dict[str, object]:
        owner = server.owner(request)
        return {
            "object": "list",
            "data": [held.shown() for held in server.documents.values() if held.owner == owner and not held.deleted],
        }

    @app.get("/v1/documents/{name}")
    async def document(name: str, request: Request) -> dict[str, object]:
        return server.held(server.owner(request), name).shown()

    @app.get("/v1/documents/{name}/kept")
    async def kept(
        name: str, request: Request, start: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=4000)] = 1000,
    ) -> dict[str, object]:  # fmt: skip
        held = server.held(server.owner(request), name)
        if held.document is None:
            raise HTTPException(409, f"document {held.id} is {held.shown()['status']}")
        return {"id": held.id, "object": "document.kept"} | await asyncio.to_thread(
            kept_page, held.document, start, limit
        )

    @app.delete("/v1/documents/{name}")
    async def delete(name: str, request: Request) -> dict[str, object]:
        held = server.held(server.owner(request), name)
        held.deleted = True
        if held.document is not None or held.error is not None:
            del server.documents[held.id]
        server.ready().forget(held.id)
        return {"id": held.id, "object": "document", "deleted": True}

    add_page(app)
    return app


SAVED = (".locret", ".safetensors")
"""Ends of the names of saved caches."""


def aside(file: BinaryIO) -> Path:
    """A temporary copy of an upload, for its owner alone."""
    with NamedTemporaryFile(prefix="locret-", suffix=SAVED[0], delete=False) as copy:
        shutil.copyfileobj(file, copy)
    return Path(copy.name)


def discard(data: bytes | Path) -> None:
    """Remove a temporary copy."""
    if isinstance(data, Path):
        data.unlink(missing_ok=True)


async def read_document(server: Server, engine: Engine, held: Held, data: bytes | Path) -> None:
    """Convert an upload and read it, among other requests, or load it as the saved cache that it is; a document that is
    deleted meanwhile ends here."""

    def progress(done: int, total: int) -> None:
        if held.deleted:
            raise Unwanted
        held.read, held.total = done, total

    def reader(model: PreTrainedModel, ids: array[int], cache: BoundedCache, told: Progress | None) -> None:
        if len(ids) > server.limits.prompt_tokens:
            raise ValueError(f"it has {len(ids)} tokens, at most {server.limits.prompt_tokens} are taken")
        engine.read(model, ids, cache, told)

    def read(text: str) -> Document:
        heads = engine.heads if engine.policy.needs_heads else None
        return Document.read(
            engine.model, engine.tokenizer, text, engine.settings, engine.policy, heads, title=held.title,
            progress=progress, reader=reader,
        )  # fmt: skip

    loop = asyncio.get_running_loop()
    try:
        async with server.converting:
            if isinstance(data, Path):
                document = await loop.run_in_executor(server.readers, engine.load_document, data)
            else:
                text = await loop.run_in_executor(
                    server.readers, partial(convert, data, held.title, unwanted=lambda: held.deleted)
                )
        held.document = document if isinstance(data, Path) else await loop.run_in_executor(server.readers, read, text)
    except Exception as error:
        held.error = first_line(error).replace(str(data), held.title) if isinstance(data, Path) else first_line(error)
        LOG.info("document %s failed: %s", held.id, type(error).__name__)
    else:
        if not held.deleted:
            engine.save_document(held.id, held.owner, held.document)
    finally:
        discard(data)
    if held.deleted:
        server.documents.pop(held.id, None)
        engine.forget(held.id)


# ---- completions -------------------------------------------------------------------------------------------------------


async def complete(server: Server, request: Request, body: ChatBody | TextBody, kind: str) -> Response:
    """Answer a completion, streamed or whole."""
    owner, engine = server.owner(request), server.ready()
    document = None
    if body.document_id is not None:
        held = server.held(owner, body.document_id)
        if held.document is None:
            return problem(409, f"document {held.id} is {held.shown()['status']}", "document_id")
        document = held.document
        if body.repetition_penalty != 1.0 and not document.has_text:
            return problem(400, "repetition_penalty needs the document's text, which is not in its file")
        if engine.store is not None:
            engine.store.used(held.id)
    most = getattr(body, "max_completion_tokens", None) or body.max_tokens or min(512, server.limits.answer_tokens)
    if most > server.limits.answer_tokens:
        return problem(400, f"max_tokens={most} must be at most {server.limits.answer_tokens}", "max_tokens")
    top_logprobs = body.wanted_logprobs
    policy = allowed_policy(server, body)
    settings = engine.session_settings(body.budget)
    ids = await asyncio.to_thread(body.ids, engine.tokenizer, document)
    if not 0 < len(ids) <= server.limits.prompt_tokens:
        return problem(
            400, f"the prompt has {len(ids)} tokens, at most {server.limits.prompt_tokens} are taken", "messages"
        )
    beginning = 0
    if document is None and engine.beginnings:
        beginning = await asyncio.to_thread(body.beginning, engine.tokenizer, ids)
    seed = secrets.randbelow(2**32) if body.seed is None else body.seed
    answers = [
        Stream(
            engine,
            body,
            Job(
                owner,
                ids,
                document,
                most,
                body.sampling,
                (seed + i) % 2**32,
                lambda: None,
                settings,
                policy,
                about=body.document_id or "",
                top_logprobs=top_logprobs,
                beginning=beginning,
            ),
        )
        for i in range(body.n)
    ]
    engine.submit(*(answer.job for answer in answers))
    head = {"id": f"{'chatcmpl' if kind[0] == 'c' else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time())}
    head |= {"model": server.name}
    if body.stream:
        return Streamed(answers, events(answers, body, kind, head))
    try:
        done = await unless_gone(request, asyncio.gather(*(answer.whole() for answer in answers)))
        if done is None:
            return problem(499, "the client has gone")
    finally:
        for answer in answers:
            answer.leave()
    choices = [
        choice(kind, i, text, answer.reason, answer.logprobs(kind, 0, answer.told))
        for i, (text, answer) in enumerate(zip(done, answers, strict=True))
    ]
    return JSONResponse({**head, "object": kind, "choices": choices, "usage": usage(answers)})


def allowed_policy(server: Server, body: Generation) -> Policy | None:
    """The policy that a request asks for. Raises HTTPException 400 where it is not among those that are allowed."""
    if body.policy is None:
        return None
    if body.policy not in server.policies:
        allowed = ", ".join(server.policies) or "none but the server's"
        raise HTTPException(400, f"policy={body.policy[:64]!r} is not allowed here; allowed: {allowed}")
    return parse_policy(body.policy)


async def unless_gone(request: Request, work: asyncio.Future[list[str]]) -> list[str] | None:
    """The result of ``work``; None where the client goes away before."""
    while not work.done():
        await asyncio.wait([work], timeout=0.2)
        if not work.done() and await request.is_disconnected():
            work.cancel()
            return None
    return work.result()


class Failed(Exception):
    """A request that the engine could not finish."""


class Streamed(StreamingResponse):
    """Events of answers, which end with it, also where the client goes before the first."""

    def __init__(self, answers: Sequence[Stream], events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self.answers:
                answer.leave()


@dataclass(frozen=True)
class Piece:
    """Final text of an answer, and which of its tokens begin in it."""

    text: str
    start: int
    end: int


class Stream:
    """One answer on its way to the client: final text, cut at the first stop text."""

    def __init__(self, engine: Engine, body: Generation, job: Job) -> None:
        self.engine, self.job, self.stops = engine, job, body.stops
        self.reason, self.told = "stop", 0
        self._starts: list[int] = []  # of tokens, in characters of the text; where they are wanted
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._window = 8 + 4 * max((len(stop) for stop in self.stops), default=0)  # a character has 4 tokens at most
        job.on_change, job.ends = self._tell, self._stopped if self.stops else None

    def _tell(self) -> None:
        """Wake the event loop, from the engine's thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    def _stopped(self, tokens: Sequence[int]) -> int | None:
        """How many tokens come before a stop text, where the newest of them show one; asked by the engine's thread, so that
        nothing is written after it."""
        newest = self._decode(tokens[-self._window :])
        if not any(stop in newest for stop in self.stops):
            return None
        end = self._end(self._decode(tokens))
        return next((at for at in range(len(tokens), 0, -1) if end is None or len(self._decode(tokens[:at])) <= end), 0)

    def _end(self, said: str) -> int | None:
        """Where the first stop text begins."""
        return min((at for stop in self.stops if (at := said.find(stop)) >= 0), default=None)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.engine.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def leave(self) -> None:
        """Cancel what is still running."""
        if self.job.text is None or self.job.text.finish_reason is None:
            self.engine.cancel(self.job)

    async def whole(self) -> str:
        """All of the answer."""
        return "".join([piece.text async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of final text.

        Raises:
            ValueError: the request cannot be answered. Failed: the engine could not. Stopping: the server stops.
        """
        shown, held = 0, max((len(stop) for stop in self.stops), default=1) - 1
        while True:
            await self._news.wait()
            self._news.clear()
            text = self.job.text
            if text is None:
                continue
            ended, tokens = text.finish_reason, list(text.tokens)
            if ended == "cancelled":
                raise Stopping("the server is stopping")
            if text.error is not None:
                raise text.error if isinstance(text.error, ValueError) else Failed(first_line(text.error))
            said = self._decode(tokens)
            end = self._end(said)
            if end is not None:
                said, ended = said[:end], "stop"
                self.leave()
            elif ended is None:  # neither half a character, nor what may begin a stop text
                if said.endswith("\ufffd"):
                    continue
                said = said[: max(shown, len(said) - held)]
            start, self.told = self.told, self._count(tokens, None if ended and end is None else len(said))
            if len(said) > shown or self.told > start:
                yield Piece(said[shown:], start, self.told)
                shown = max(shown, len(said))
            if ended is not None:
                self.reason = "length" if ended == "length" else "stop"
                return

    def _count(self, tokens: list[int], end: int | None) -> int:
        """How many tokens begin before a character; 0 where nobody wants to know."""
        if self.job.top_logprobs is None:
            return 0
        for at in range(len(self._starts), len(tokens)):
            self._starts.append(len(self._decode(tokens[:at]).rstrip("\ufffd")))
        return len(tokens) if end is None else max(self.told, sum(start < end for start in self._starts))

    def logprobs(self, kind: str, start: int, end: int) -> dict[str, object] | None:
        """Log-probabilities of some tokens, as the protocol has them."""
        text, most = self.job.text, self.job.top_logprobs
        if text is None or most is None:
            return None
        spell = lru_cache(lambda token: str(self.engine.tokenizer.decode([token])))
        pairs = list(zip(text.tokens[start:end], text.logprobs[start:end], strict=True))
        if kind == "chat.completion":

            def entry(token: int, value: float) -> dict[str, object]:
                return {"token": spell(token), "logprob": value, "bytes": list(spell(token).encode())}

            return {
                "content": [
                    entry(token, one.token) | {"top_logprobs": [entry(*pair) for pair in one.top]}
                    for token, one in pairs
                ]
            }
        return {
            "tokens": [spell(token) for token, _ in pairs],
            "token_logprobs": [one.token for _, one in pairs],
            "top_logprobs": [
                {spell(id): value for id, value in one.top} | {spell(token): one.token} for token, one in pairs
            ],
            "text_offset": self._starts[start:end],
        }


async def events(answers: Sequence[Stream], body: Generation, kind: str, head: dict[str, object]) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer; choices one after another."""
    name = "chat.completion.chunk" if kind == "chat.completion" else kind
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    extra = {"usage": None} if wants_usage else {}

    def event(value: dict[str, object]) -> str:
        return f"data: {json.dumps({**head, 'object': name, **value}, ensure_ascii=False)}\n\n"

    try:
        for i, answer in enumerate(answers):
            if kind == "chat.completion":
                yield event({"choices": [delta(kind, i, "", None, first=True)], **extra})
            async for piece in answer.pieces():
                values = answer.logprobs(kind, piece.start, piece.end)
                yield event({"choices": [delta(kind, i, piece.text, None, values)], **extra})
            yield event({"choices": [delta(kind, i, "", answer.reason, last=True)], **extra})
        if wants_usage:
            yield event({"choices": [], "usage": usage(answers)})
        yield "data: [DONE]\n\n"
    except (ValueError, Failed, Stopping) as error:
        yield f"data: {bytes(problem(500, first_line(error)).body).decode()}\n\n"


Logprobs = dict[str, object] | None


def choice(kind: str, index: int, text: str, reason: str, logprobs: Logprobs) -> dict[str, object]:
    """One choice of a whole answer."""
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
    return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}


def delta(
    kind: str, index: int, text: str, reason: str | None, logprobs: Logprobs = None, *,
    first: bool = False, last: bool = False,
) -> dict[str, object]:  # fmt: skip
    """One choice of an event."""
    end: dict[str, object] = {"finish_reason": reason, "logprobs": logprobs}
    if kind != "chat.completion":
        return {"index": index, "text": text, **end}
    said: dict[str, str] = {} if last else {"content": text}
    return {"index": index, "delta": {"role": "assistant", **said} if first else said, **end}


def usage(answers: Sequence[Stream]) -> dict[str, object]:
    """Tokens of a request; ``locret`` has the cache's own figures."""
    jobs = [answer.job for answer in answers]
    new = sum(len(job.text.tokens) for job in jobs if job.text is not None)
    prompt = len(jobs[0].ids)
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": jobs[0].cached_tokens},
        "locret": {"evictions": max(job.evictions for job in jobs), "kept_rows": max(job.kept_rows for job in jobs)},
    }  # fmt: skip
