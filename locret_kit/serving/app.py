"""OpenAI's and Anthropic's protocols over the engine: models, completions, documents, health, metrics, and a page.

Each request gets a name, and may be refused before its body is read. Prompts and answers are never logged. Every document and
every cache belongs to the API key that made it.
"""

import asyncio
import secrets
import time
from importlib.resources import files
from typing import Annotated
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..text.tokens import IdStream, TooManyTokens, token_texts
from .anthropic_messages import CountBody, MessageReply, MessagesBody
from .bodies import MAX_TOKENS, ChatBody, TextBody
from .completions import ChatReply, TextReply, begin
from .document_routes import add_documents
from .messages import ANTHROPIC, RESPONSES, JsonObject, Part, Refused, add_errors, checked, places, problem
from .process import refusal
from .request import LOG
from .responses import ResponseReply, ResponsesBody
from .state import Server


class Tokenize(Part):
    """``POST /tokenize``: of a text, or of the prompt that messages make, with fields of a chat completion."""

    model_config = ConfigDict(extra="allow")
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    special: Annotated[bool | None, places("add_special_tokens", "add_special")] = None
    """Whether special tokens are added; by default to a prompt, as in vLLM, and not to a content, as in llama.cpp."""
    with_pieces: bool = False


class Detokenize(BaseModel):
    """``POST /detokenize``."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=MAX_TOKENS)]


NO_THREADS = "thread_unsupported_request"
"""Code at which Anthropic's clients go on without threads, and send whole conversations."""


def add_answers(app: FastAPI, server: Server) -> None:
    """Serve completions of chats and of texts, responses, and Anthropic's messages with their count of tokens."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return ChatReply(server, body, await begin(server, request, body))

    @app.post("/v1/completions")
    async def completion(body: TextBody, request: Request) -> Response:
        return TextReply(server, body, await begin(server, request, body))

    @app.post(RESPONSES)
    async def respond(asked: JsonObject, request: Request) -> Response:
        resolved = server.items.resolved(server.owner(request), asked.get("input"))
        body = checked(ResponsesBody, {**asked, "input": resolved})
        return ResponseReply(server, body, await begin(server, request, body))

    @app.post(ANTHROPIC)
    async def message(body: MessagesBody, request: Request) -> Response:
        if body.thread is not None:
            raise Refused(400, "thread is not supported: send the whole conversation", "thread", NO_THREADS)
        return MessageReply(server, body, await begin(server, request, body))

    @app.post(f"{ANTHROPIC}/count_tokens")
    def count(body: CountBody, request: Request) -> dict[str, int]:
        document = server.document_of(request, body.document_id)
        (ids,) = body.ids(server.ready().tokenizer, document, MAX_TOKENS)
        return {"input_tokens": len(ids)}


def add_information(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/models``, ``/tokenize`` and ``/detokenize``, as vLLM and llama.cpp have them."""

    def model() -> dict[str, object]:
        length = server.limits.prompt_tokens
        return {
            "id": server.name, "object": "model", "created": server.started, "owned_by": "locret_kit", "root": server.name,
            "max_model_len": length, "context_length": length, "meta": {"n_ctx": length},
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, object]:
        if name != server.name:
            raise HTTPException(404, f"model {name[:64]!r} is not here: {server.name} is")
        return model()

    def tokenize(body: Tokenize, request: Request) -> Response:
        tokenizer, length = server.ready().tokenizer, server.limits.prompt_tokens
        max_tokens = length if body.with_pieces else MAX_TOKENS
        try:
            if body.messages is not None:
                chat = checked(ChatBody, {**(body.model_extra or {}), "messages": body.messages})
                (ids,) = chat.ids(tokenizer, server.document_of(request, chat.document_id), max_tokens)
            else:
                text = body.prompt if body.content is None else body.content
                if text is None:
                    raise HTTPException(400, "content (or prompt, or messages) is missing")
                special = body.content is None if body.special is None else body.special
                ids = IdStream(tokenizer, special=special, max_tokens=max_tokens).finish(text)
        except TooManyTokens:
            raise HTTPException(400, f"the text has more than {max_tokens} tokens, the most that are listed") from None
        tokens: list[object] = list(ids)
        if body.with_pieces:
            pieces = token_texts(tokenizer, list(ids))
            tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)]
        return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": length})

    def detokenize(body: Detokenize) -> dict[str, object]:
        tokenizer = server.ready().tokenizer
        if wrong := next((token for token in body.tokens if token >= len(tokenizer)), None):
            raise HTTPException(400, f"tokens holds {wrong}, which is no token from 0 to {len(tokenizer) - 1}")
        text = str(tokenizer.decode(body.tokens))
        return {"content": text, "prompt": text}

    for base in ("", "/v1"):
        app.post(f"{base}/tokenize")(tokenize)
        app.post(f"{base}/detokenize")(detokenize)


GONE = 499
"""Status in the log where the client went before there was one."""


class NamedRequests:
    """Name requests. Log each with its status and the seconds to the end of its answer. The client's messages pass unchanged, so
    routes see a disconnect."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name, began, status = f"req_{secrets.token_hex(8)}", time.perf_counter(), GONE

        async def naming(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name.encode())]}
            await send(message)

        try:
            await self.app(scope, receive, naming)
        finally:
            seconds = time.perf_counter() - began
            LOG.info("%s %s %s %d %.2fs", name, scope["method"], quote(scope["path"]), status, seconds)  # no line ends


class Guard:
    """Refuse requests before their body is held.

    Refused are requests without a key, or, where the server has no keys, by a foreign name or page (see ``process``). So are
    bodies beyond a size, with or without a Content-Length, or slower than a time.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limits, upload = self.server.limits, scope["path"].startswith("/v1/documents")
        max_bytes = limits.upload_bytes if upload else limits.body_bytes
        seconds = limits.upload_seconds if upload else limits.body_seconds
        had, whole = 0, False
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
            if had > max_bytes:
                raise Refused(413, f"the body must be at most {max_bytes} bytes")
            return message

        try:
            keyless = not self.server.keys and scope["path"] != "/health"
            if keyless and (why := refusal(scope, self.server.hosts, self.server.origins)):
                raise Refused(403, why)
            if scope["path"].startswith(("/v1/", "/metrics", "/tokenize", "/detokenize")):
                self.server.owner(Request(scope))
            length = next((int(v) for k, v in scope["headers"] if k == b"content-length" and v.isdigit()), 0)
            if length > max_bytes:
                raise Refused(413, f"the body must be at most {max_bytes} bytes")
        except HTTPException as error:
            closed = {"connection": "close"}  # the body is not read to its end
            answer = problem(Refused(error.status_code, error.detail, headers=closed), scope["path"])
            return await answer(scope, receive, send)
        await self.app(scope, bounded, send)


FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/page.marked.js": "text/javascript"}
"""The page: four files that ask for nothing but this server."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(server: Server) -> ASGIApp:
    """The application. Requests are named around all of it: refusals and faults too. Whoever runs it stops the server."""
    app = FastAPI(title="locret-serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, server=server)
    if server.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=sorted(server.origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "x-max-tokens", "x-left-out", "retry-after"],
        )  # fmt: skip

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        status = "loading" if server.engine is None else "failed" if server.engine.failed else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(server.figures()), media_type="text/plain; version=0.0.4")

    for add in (add_answers, add_documents, add_information):
        add(app, server)
    add_errors(app)
    for path, kind in FILES.items():  # without a key: what the page shows, it asks for with one
        body = files(__package__).joinpath(path[1:] or "page.html").read_bytes()
        app.router.routes.append(Route(path, Response(body, headers=HEADERS, media_type=kind), methods=["GET"]))
    return NamedRequests(app)
