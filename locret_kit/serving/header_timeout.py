"""A limit on the time that a client takes to send its headers; uvicorn has one for what comes between requests alone."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HeaderTimeout(H11Protocol):
    """A connection that is closed where the headers of a request are not whole after ``seconds``."""

    seconds = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.seconds, self._late)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._timer is None and self._between:
            self._timer = self.loop.call_later(self.seconds, self._late)
        super().data_received(data)
        if self.cycle is not before:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    @property
    def _between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._between and not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()
