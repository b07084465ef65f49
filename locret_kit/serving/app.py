"""OpenAI's protocol over the engine: models, completions, documents, health, metrics, and a page.

Prompts and answers are never logged. Every document and every cache belongs to the key with which it was made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from .completions import add_completions
from .document_routes import add_documents
from .errors import add_errors
from .guard import Guard
from .metrics import metrics_of
from .page import add_page
from .state import Server

LOG = logging.getLogger("locret_kit.serving")


def make_app(server: Server) -> FastAPI:
    """The application. It stops the server when it ends."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.stop)

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

    @app.get("/health")
    async def health() -> JSONResponse:
        status = "loading" if server.engine is None else "failed" if server.engine.failed else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

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

    for add in (add_completions, add_documents):
        add(app, server)
    add_errors(app)
    add_page(app)
    return app
