"""The end of a server: answers that run end with their last word or, after the grace, with one that says why. uvicorn alone
would cancel their tasks, each with a traceback."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import uvicorn

FLUSH = 1.0
"""Seconds in which a client takes what was written last; then its connection is broken off."""


class Stoppable(uvicorn.Server):
    """A uvicorn server that has ``end`` stop what it serves, while answers still go out.

    Args:
        end: stops the engine; blocks until that is done. ``config.timeout_graceful_shutdown`` must be longer.
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
