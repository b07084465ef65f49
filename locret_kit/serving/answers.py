"""Answers on their way from the engine to the client: pieces and blocks of one, and the reply to a request by a protocol."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import Literal

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..naming import first_line
from ..text.tokens import TextStream, token_texts
from .bodies import CompletionBody
from .engine_thread import EngineThread
from .messages import Failed, JsonObject, error_of, refusal_of
from .request import ServerRequest, Stopping
from .state import Server
from .tools import Call, CallReader

Step = Literal["begin", "grow", "end"]


Token = tuple[int, list[tuple[int, float]], int]
"""A token, log-probabilities of the likeliest and its own (of a prompt's first none), and the characters before it."""


@dataclass(frozen=True)
class AnswerPiece:
    """Final text of an answer, the tokens that begin in it where they are asked for, and the calls of tools that end in it."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class AnswerStream:
    """One answer on its way to the client: final text, cut at the first stop text.

    Args:
        echoes: whether the prompt's text stands before it. calls: a reader of calls of tools; None where there are none.

    Attributes:
        pieces, blocks: what the client has got so far.
        reason: why it ended: "stop", "length" or "tool_calls". stop_text: the stop text at which it ended; None where at none.
    """

    def __init__(
        self, engine: EngineThread, request: ServerRequest, stops: Sequence[str], *, echoes: bool = False,
        calls: CallReader | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.request, self.stops, self.echoes, self.calls = engine, request, stops, echoes, calls
        self.pieces, self.blocks, self.reason = list[AnswerPiece](), list[str | Call](), "stop"
        self.stop_text: str | None = None
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        # Written by the engine's thread: final text, the end of it that may begin a stop text, characters after so many tokens.
        marks = engine.tokenizer.get_added_vocab().items() if calls is not None else ()
        shown = frozenset(at for mark, at in marks if calls and mark in calls.marks)
        self._stream, self._said, self._ends = TextStream(engine.tokenizer, shown=shown), list[str](), [0]
        self._withheld, self._newest = max((len(stop) for stop in stops), default=1) - 1, ""
        self._cut: int | None = None
        self._ended: str | None = None
        self._first_call = deepcopy(calls) if calls is not None and not calls.parallel else None
        request.on_change, request.stop_at = self._tell, self._take

    def _tell(self) -> None:
        """Wake the event loop, from the engine's thread."""
        sequence = self.request.sequence
        if sequence is not None and sequence.finish_reason is not None and self._ended is None:
            self._add(self._stream.end(), final=True)
            self._ended = sequence.finish_reason
        self._loop.call_soon_threadsafe(self._news.set)

    def _take(self, tokens: Sequence[int]) -> int | None:
        """Take the newest tokens, from the engine's thread. Gives the number of tokens before a stop text, or with the one call
        that there may be, where these show its end, so that nothing is written after it."""
        ends = self._ends
        for token in tokens[len(ends) - 1 :]:
            ends.append(ends[-1])
            self._add(self._stream.add(token))
        if self._cut is not None:
            return bisect_left(ends, ends[bisect_right(ends, self._cut) - 1])
        return len(tokens) if self._first_call is not None and self._first_call.ended else None

    def _add(self, piece: str, *, final: bool = False) -> None:
        """Add text. Where stop texts end in it, the answer is cut at the one that begins first."""
        if self._cut is not None or not (piece or final):
            return
        text, before = self._newest + piece, self._ends[-1] - len(self._newest)
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        size = len(text) if final else max(0, len(text) - self._withheld)
        if found:
            size, self.stop_text = min(found, key=itemgetter(0))
            self._cut = before + size
        elif self._first_call is not None:
            self._first_call.feed(piece)
        self._newest = text[size:]
        self._ends[-1] += len(piece)
        self._said.append(text[:size])

    async def stream_blocks(self) -> AsyncIterator[tuple[Step, int, str | Call]]:
        """Blocks by their numbers, each a run of text or one call: its begin and its first part, parts by which it grows, of
        which that is one, and its end and all of it. Blanks around calls are left out. Raises as ``stream_pieces``."""
        blocks, blanks = self.blocks, ""
        async for piece in self.stream_pieces():
            text = blanks + piece.text
            blanks = text[len(text.rstrip()) :] if self.calls is not None else ""
            parts: list[str | Call] = [text.removesuffix(blanks), *piece.calls]
            for part in parts if parts[0] else piece.calls:
                if blocks and isinstance(part, str) and isinstance(blocks[-1], str):
                    blocks[-1] = f"{blocks[-1]}{part}"
                else:
                    if blocks:
                        yield "end", len(blocks) - 1, blocks[-1]
                    blocks.append(part)
                    yield "begin", len(blocks) - 1, part
                yield "grow", len(blocks) - 1, part
            blanks = "" if piece.calls else blanks
        if blanks and blocks and isinstance(blocks[-1], str):
            blocks[-1] = f"{blocks[-1]}{blanks}"
            yield "grow", len(blocks) - 1, blanks
        if blocks:
            yield "end", len(blocks) - 1, blocks[-1]

    async def stream_pieces(self) -> AsyncIterator[AnswerPiece]:
        """Pieces of text, and calls of tools, each when it is whole. Raises as ``_stream_text``."""
        async for piece in self._stream_text():
            if self.calls is not None:
                text, calls = self.calls.feed(piece.text)
                piece = replace(piece, text=text, calls=calls)
            self.pieces.append(piece)
            yield piece
        if self.calls is not None:
            text, calls = self.calls.feed("", final=True, cut=self.reason == "length")
            if text or calls:
                self.pieces.append(piece := AnswerPiece(text, calls=calls))
                yield piece
            if self.calls.calls:
                self.reason = "tool_calls"

    async def _stream_text(self) -> AsyncIterator[AnswerPiece]:
        """Pieces of final text, as the model writes it.

        Raises:
            ValueError: the request cannot be answered. Failed: the engine could not. Stopping: the server stops.
        """
        request, ends = self.request, self._ends
        echo = str(self.engine.tokenizer.decode(list(request.ids))) if self.echoes else ""
        taken, shown, end, ended, before = 0, 0, 0, None, len(echo)
        while ended is None:
            await self._news.wait()
            self._news.clear()
            sequence, ended = request.sequence, self._ended
            assert sequence is not None
            if ended == "cancelled":
                raise Stopping("the server is stopping")
            if sequence.error is not None:
                raise sequence.error if isinstance(sequence.error, ValueError) else Failed(first_line(sequence.error))
            new, start = self._said[taken:], end
            text, taken = "".join(new), taken + len(new)
            shown += len(text)
            if request.top_logprobs is not None:
                end = min(len(sequence.tokens), len(ends) - 1)
                end = end if ended and self._cut is None else bisect_left(ends, shown, 0, end)
            if text or end > start or (ended and echo):
                offsets = [at + before for at in ends[start:end]]
                tokens = zip(sequence.tokens[start:end], sequence.logprobs[start:end], offsets, strict=True)
                yield AnswerPiece(echo + text, [*(self._prompt_tokens() if echo else ()), *tokens])
                echo = ""
        self.reason = "length" if ended in ("length", "read") and self._cut is None else "stop"

    def _prompt_tokens(self) -> Iterable[Token]:
        """Tokens of the prompt, where their log-probabilities are asked for."""
        sequence, ids = self.request.sequence, list(self.request.ids)
        if sequence is None or not self.request.prompt_logprobs:
            return ()
        offsets = accumulate(map(len, token_texts(self.engine.tokenizer, ids)[:-1]), initial=0)
        return zip(ids, [[], *sequence.prompt_logprobs], offsets, strict=True)


class Reply(StreamingResponse, ABC):
    """The answers to a request in a protocol's words: events as they come, or JSON when all have ended. They end where the
    client goes.

    Silence lasts for at most ``server.silence`` seconds: a comment follows, which clients leave out, or before JSON a line's end,
    which it may begin with. A whole answer's status is sent with the first of these; what fails after it breaks the connection
    off.
    """

    path = ""
    """Beginning of the paths whose errors are in the same shape."""
    last = ""
    """Event after all others."""

    def __init__(self, server: Server, body: CompletionBody, answers: Sequence[AnswerStream]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"} if body.stream else {}
        headers["x-max-tokens"] = str(answers[0].request.max_new_tokens)  # they may be fewer than were asked for
        kind = "text/event-stream" if body.stream else "application/json"
        super().__init__(self._chunks(), media_type=kind, headers=headers)
        self.server, self.asked, self.answers, self.answer = server, body, answers, answers[0]

    @abstractmethod
    def values(self) -> AsyncIterator[JsonObject]:
        """Events, of which the last is said at the end of all answers. Raises as ``AnswerStream.stream_pieces``."""

    @abstractmethod
    def whole(self) -> JsonObject:
        """All answers, when they have ended."""

    def failed(self, error: Exception) -> JsonObject:
        """The event of an error, with the type that a whole answer's error has."""
        return error_of(refusal_of(error, self.path), self.path)

    async def _chunks(self) -> AsyncIterator[bytes | memoryview]:
        """An answer's bytes: of each event, or of all."""
        if not self.asked.stream:
            async for _ in self.values():
                pass
            yield JSONResponse(self.whole()).body
            return
        try:
            async for value in self.values():
                yield event(value)
            yield self.last.encode()
        except (ValueError, Failed, Stopping) as error:
            yield event(self.failed(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, silence = self.asked.stream, b": waiting\n\n" if self.asked.stream else b"\n"
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        chunks, gone = aiter(self.body_iterator), asyncio.ensure_future(left(receive))
        chunk = asyncio.ensure_future(anext(chunks, b""))
        try:
            if begun:
                await send(start)
            while True:
                await asyncio.wait({chunk, gone}, timeout=self.server.silence, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                said = chunk.result() if chunk.done() else silence
                if not begun:
                    self.raw_headers += [(b"content-length", b"%d" % len(said))] if chunk.done() else []
                    await send(start)
                    begun = True
                await send({"type": "http.response.body", "body": said, "more_body": bool(said)})
                if not said:
                    return
                if chunk.done():
                    chunk = asyncio.ensure_future(anext(chunks, b""))
        finally:
            for answer in self.answers:
                answer.engine.cancel(answer.request)
            for task in (chunk, gone):
                task.cancel()
            await asyncio.gather(chunk, gone, return_exceptions=True)


def event(value: Mapping[str, object]) -> bytes:
    """A server-sent event. Where it has a type, that is its name."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


async def left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
