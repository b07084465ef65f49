"""A port that answers before the server is there: with status 503, while libraries are imported. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

WORDS = "the model is being loaded"
HEALTH: dict[str, object] = {"status": "loading"}
ERROR: dict[str, object] = {
    "error": {"message": WORDS, "type": "service_unavailable_error", "param": None, "code": None}
}


class LoadingApp:
    """An ASGI application that stands in for ``app`` until that is there."""

    app: ASGIApp | None = None
    _stop: Callable[[float], None] | None = None

    def put(self, app: ASGIApp, stop: Callable[[float], None]) -> None:
        """Have ``app`` answer from now on. ``stop``: ends it, within a grace in seconds."""
        self.app, self._stop = app, stop

    def stop(self, grace: float) -> None:
        """End what was put here."""
        if self._stop is not None:
            self._stop(grace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        body = json.dumps(HEALTH if scope["path"] == "/health" else ERROR).encode()
        headers = [
            (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"5"), (b"connection", b"close"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
