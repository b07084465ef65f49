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
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated
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

    def ready(self) -> Engine:
        """The engine. Raises HTTPException 503 while it is loading."""
        if self.engine is None:
            raise HTTPException(503, "the model is being loaded")
        return self.engine

    def owner(self, request: Request) -> str:
        """Who asks, as a hash of the key. Raises HTTPException 401."""
        if not self.keys:
            return ""
        given = request.headers.get("authorization", "").encode("latin-1").removeprefix(b"Bearer ")
        digest = hashlib.sha256(given).digest()
        known = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in self.keys]
        if not any(known):  # every key was compared, by its hash: equal time, whatever its length
            raise HTTPException(401, "the API key is missing or wrong")
        return digest.hex()

    def held(self, owner: str, name: str) -> Held:
        """An owner's document. Raises HTTPException 404, for another owner's too."""
        found = self.documents.get(name)
        if found is None or found.owner != owner or found.deleted:
            raise HTTPException(404, f"document {name[:64]!r} is not there")
        return found


class Guard:
    """Refuse, before a body is held: a request without a key, and bodies beyond a size, with or without a Content-Length, or
    slower than a time.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server, self.limits = app, server, server.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limits, upload = self.limits, scope["path"].startswith("/v1/documents")
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
        data = await file.read()
        if len(server.documents) >= server.limits.documents:  # after the last await: two uploads cannot both pass
            return problem(429, f"{len(server.documents)} documents are held already: delete one first")
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


async def read_document(server: Server, engine: Engine, held: Held, data: bytes) -> None:
    """Convert an upload and read it, among other requests; a document that is deleted meanwhile ends here."""

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
            text = await loop.run_in_executor(
                server.readers, partial(convert, data, held.title, unwanted=lambda: held.deleted)
            )
        held.document = await loop.run_in_executor(server.readers, read, text)
    except Exception as error:
        held.error = first_line(error)
        LOG.info("document %s failed: %s", held.id, type(error).__name__)
    if held.deleted:
        server.documents.pop(held.id, None)


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
    most = getattr(body, "max_completion_tokens", None) or body.max_tokens or min(512, server.limits.answer_tokens)
    if most > server.limits.answer_tokens:
        return problem(400, f"max_tokens={most} must be at most {server.limits.answer_tokens}", "max_tokens")
    if isinstance(body, ChatBody) and body.logprobs:
        return problem(400, "logprobs is not supported", "logprobs")
    policy = allowed_policy(server, body)
    settings = engine.session_settings(body.budget)
    ids = await asyncio.to_thread(body.ids, engine.tokenizer, document)
    if not 0 < len(ids) <= server.limits.prompt_tokens:
        return problem(
            400, f"the prompt has {len(ids)} tokens, at most {server.limits.prompt_tokens} are taken", "messages"
        )
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
        texts = await unless_gone(request, asyncio.gather(*(answer.whole() for answer in answers)))
        if texts is None:
            return problem(499, "the client has gone")
    finally:
        for answer in answers:
            answer.leave()
    choices = [
        choice(kind, i, text, answer.reason) for i, (text, answer) in enumerate(zip(texts, answers, strict=True))
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


class Stream:
    """One answer on its way to the client: final text, cut at the first stop text."""

    def __init__(self, engine: Engine, body: Generation, job: Job) -> None:
        self.engine, self.job, self.stops = engine, job, body.stops
        self.reason = "stop"
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        job.on_change = self._tell

    def _tell(self) -> None:
        """Wake the event loop, from the engine's thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    def leave(self) -> None:
        """Cancel what is still running."""
        if self.job.text is None or self.job.text.finish_reason is None:
            self.engine.cancel(self.job)

    async def whole(self) -> str:
        """All of the answer."""
        return "".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[str]:
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
            said = str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))
            found = [at for stop in self.stops if (at := said.find(stop)) >= 0]
            if found:
                said, ended = said[: min(found)], "stop"
                self.leave()
            elif ended is None:  # neither half a character, nor what may begin a stop text
                if said.endswith("\ufffd"):
                    continue
                said = said[: max(shown, len(said) - held)]
            if len(said) > shown:
                yield said[shown:]
                shown = len(said)
            if ended is not None:
                self.reason = "length" if ended == "length" else "stop"
                return


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
                yield event({"choices": [delta(kind, i, piece, None)], **extra})
            yield event({"choices": [delta(kind, i, "", answer.reason, last=True)], **extra})
        if wants_usage:
            yield event({"choices": [], "usage": usage(answers)})
        yield "data: [DONE]\n\n"
    except (ValueError, Failed, Stopping) as error:
        yield f"data: {bytes(problem(500, first_line(error)).body).decode()}\n\n"


def choice(kind: str, index: int, text: str, reason: str) -> dict[str, object]:
    """One choice of a whole answer."""
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
    return {"index": index, **said, "finish_reason": reason, "logprobs": None}


def delta(
    kind: str, index: int, text: str, reason: str | None, *, first: bool = False, last: bool = False
) -> dict[str, object]:
    """One choice of an event."""
    if kind != "chat.completion":
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
    said: dict[str, str] = {} if last else {"content": text}
    return {"index": index, "delta": {"role": "assistant", **said} if first else said, "finish_reason": reason}


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
