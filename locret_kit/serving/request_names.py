"""A name for each request, in its answer's header and in one line of the log."""

from __future__ import annotations

import logging
import secrets
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("locret_kit.serving")
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
