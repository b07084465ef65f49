"""A server's process: its port while it loads, headers that come late, its end, and memory that goes back to the system; and the
names and pages that it answers without keys.
"""

import asyncio
import ctypes
import re
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from ipaddress import ip_address

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# ---- names and pages that are answered without keys -----------------------------------------------------------------

# A web page from anywhere can send requests to this machine and its network through the browser of whoever looks at it. Where
# its own name is made to lead here (DNS rebinding), the browser lets it read the answers too; ``Host`` then has that name. A form
# that it sends without that changes things all the same; ``Sec-Fetch-Site`` or ``Origin`` tell. With keys neither matters: a page
# has none.


LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"
"""Name that stands for every name."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. CORS headers go to known origins alone, so no other page can read their answers."""


def name_of(host: str) -> str:
    """The name or address of a ``Host``, as browsers write it, without port and brackets; '' where it is none."""
    parts = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([\w.-]+))(?::\d*)?", host, re.ASCII)
    if parts is None:
        return ""
    try:
        return str(ip_address(parts[1] or parts[2]))
    except ValueError:
        return (parts[2] or "").lower()


def refusal(scope: Scope, names: Collection[str], origins: Collection[str] = ()) -> str:
    """Reason for refusing a request; '' if it is allowed.

    Args:
        names: the server's names, besides loopback's and the address that received the request. origins: of pages that may use
            it.
    """
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if ANY not in names and name_of(host) not in {*LOOPBACK, *names, *(scope["server"] or ())[:1]}:
        return f"Host {host[:100]!r} is not known here: --allowed-hosts adds names; with API keys any will do"
    if scope["method"] in READING:
        return ""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if origin is not None and not {ANY, origin}.isdisjoint(origins):
        return ""
    own = origin is None or origin.partition("://")[2] == host
    if site is not None:  # of newer browsers; pages cannot set it, and proxies leave it as it is
        own = site in ("same-origin", "none")
    said = f"Origin {str(origin)[:100]!r}, Host {host[:100]!r}, Sec-Fetch-Site {str(site)[:100]!r}"
    return "" if own else f"a page of another origin asks: {said}"


# ---- the process -----------------------------------------------------------------------------------------------------


ERROR = {"message": "the model is being loaded", "type": "service_unavailable_error", "param": None, "code": None}


class LoadingApp:
    """An ASGI application that stands in for ``app`` until that is there. ``stop`` then ends it, within a grace in seconds."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.stop: Callable[[float], None] = lambda grace: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        said = {"status": "loading"} if scope["path"] == "/health" else {"error": ERROR}
        await JSONResponse(said, 503, {"retry-after": "5", "connection": "close"})(scope, receive, send)


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


FLUSH = 1.0
"""Seconds for a client to take the last bytes; then its connection is closed."""


class Stoppable(uvicorn.Server):
    """A uvicorn server that calls ``end`` to stop the engine while answers still go out.

    Args:
        end: stops the engine and blocks until it has stopped. ``config.timeout_graceful_shutdown`` must be longer.
    """

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop. A second Ctrl-C waits for nothing."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            try:
                self._end()
            finally:
                with suppress(RuntimeError):  # nobody waits any more
                    loop.call_soon_threadsafe(ended.set)

        async def part() -> None:
            """Break off the connections whose clients do not take their last words."""
            await ended.wait()
            await asyncio.sleep(FLUSH)
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()

        threading.Thread(target=end, name="locret-stop", daemon=True).start()
        parting = asyncio.create_task(part())
        await super().shutdown(sockets)
        while not (ended.is_set() or self.force_exit):
            await asyncio.sleep(0.05)
        parting.cancel()


SECONDS = 0.5
"""Seconds between two returns of memory. For as long, a freed cache may count besides a new one."""


def give_back(ended: threading.Event) -> None:
    """Give freed memory back, now and every half second until ``ended``, by a thread of its own. ctypes lets other threads run
    meanwhile."""
    try:
        trim = ctypes.CDLL(None).malloc_trim  # of glibc
    except (AttributeError, OSError, TypeError):  # another C library; Windows
        return

    def again() -> None:
        while not ended.wait(SECONDS):
            trim(0)

    trim(0)
    threading.Thread(target=again, name="locret-trim", daemon=True).start()
