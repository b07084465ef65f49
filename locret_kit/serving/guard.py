"""What stands around every request: its name, and refusals before a body is held."""

from __future__ import annotations

import asyncio
import secrets
import time
from urllib.parse import quote

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refused, problem
from .hosts import refusal
from .request import LOG
from .state import Server

GONE = 499
"""Status in the log where the client went before there was one."""


class NamedRequests:
    """Name requests; log each with its status and the seconds to the end of its answer. What the client sends is passed on as it
    is, so that routes see when it goes."""

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
    """Refuse, before a body is held: a request without a key, or, where none is asked for, by a foreign name or page
    (``hosts``); and bodies beyond a size, with or without a Content-Length, or slower than a time.
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
            except asyncio.TimeoutError:
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
