"""Uploads as text, so that no file keeps others waiting: short conversions before long ones, owners by turns."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO

from ..text.convert import Late, convert
from ..text.reader import CONVERTED, may_be_text, read_stream

SHORT, LONG = 4, 60
"""Seconds of processor time of a conversion, in the first lane and in the second."""


@dataclass
class Turns:
    """A place for one conversion at a time; owners have it by turns."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    owners: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Hold the place. Of an owner's uploads one at a time waits for it among those of others."""
        async with self.owners[owner], self.lock:
            yield


@dataclass
class Conversions:
    """Two places: a file that takes longer than ``SHORT`` in the first begins again in the second."""

    short: Turns = field(default_factory=Turns)
    long: Turns = field(default_factory=Turns)

    async def text(
        self,
        pool: Executor,
        data: bytes,
        name: str,
        owner: str,
        unwanted: Callable[[], bool],
        lost: Callable[[str], None],
    ) -> str:
        """The text of an upload as ``text.convert`` gives it. Plain text, which needs no parser, waits for nobody."""
        loop = asyncio.get_running_loop()
        if not name.lower().endswith(CONVERTED) and may_be_text(data[:1024]):
            return await loop.run_in_executor(pool, partial(read_stream, BytesIO(data), name, lost=lost))
        lines: list[str] = []
        made = partial(convert, data, name, unwanted=unwanted, lost=lines.append)
        try:
            async with self.short.turn(owner):
                text = await loop.run_in_executor(pool, partial(made, seconds=SHORT))
        except Late:
            async with self.long.turn(owner):
                text = await loop.run_in_executor(pool, partial(made, seconds=LONG))
        for line in lines:
            lost(line)
        return text
