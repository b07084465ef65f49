"""OpenAI's and Anthropic's protocols over the engine: models, completions, documents, health, metrics, and a page.

Prompts and answers are never logged. Every document and every cache belongs to the key with which it was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from .anthropic_routes import add_anthropic
from .completions import add_completions
from .document_routes import add_documents
from .errors import add_errors
from .guard import Guard, NamedRequests
from .information import add_information
from .responses_routes import add_responses
from .state import Server

FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
"""The page: three files that ask for nothing but this server."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(server: Server) -> ASGIApp:
    """The application. It stops the server when it ends. Requests are named around all of it: refusals and faults too."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.stop)

    app = FastAPI(title="locret-serve", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, server=server)
    if server.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=sorted(server.origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "x-max-tokens"],
        )  # fmt: skip

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        status = "loading" if server.engine is None else "failed" if server.engine.failed else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> PlainTextResponse:
        server.owner(request)
        return PlainTextResponse(generate_latest(server.figures()), media_type="text/plain; version=0.0.4")

    for add in (add_completions, add_responses, add_anthropic, add_documents, add_information):
        add(app, server)
    add_errors(app)
    for path, kind in FILES.items():  # without a key: what the page shows, it asks for with one
        body = files(__package__).joinpath(path[1:] or "page.html").read_bytes()
        app.router.routes.append(Route(path, Response(body, headers=HEADERS, media_type=kind), methods=["GET"]))
    return NamedRequests(app)
