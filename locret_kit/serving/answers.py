"""Answers on their way from the engine to the client: pieces and blocks of one, and the reply to a request by a protocol."""

import asyncio
import json
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..answers.reader import Call, Event, Reader
from ..naming import first_line
from ..text.tokens import TextStream, token_texts
from .bodies import CompletionBody
from .engine_thread import EngineThread
from .messages import Failed, JsonObject, error_of, refusal_of
from .request import LOG, ServerRequest, Stopping
from .state import Server

Step = Literal["begin", "grow", "end"]
Kind = Literal["thought", "text", "call"]
FULL = ("length", "read")
"""Why answers end that would have gone on."""
Token = tuple[int, list[tuple[int, float]], int]
"""A token, log-probabilities of the likeliest and its own (of a prompt's first none), and the characters before it."""


@dataclass
class Block:
    """A thought or text, or a call, whose text is its arguments."""

    index: int
    kind: Kind
    call: Call | None = None
    text: str = ""


class AnswerStream:
    """One answer on its way to the client, up to the reader's stop text.

    Attributes:
        events, blocks: sent to the client so far. tokens: their tokens.
        reason: why it ended: "stop", "length" or "tool_calls". warning: words on a call that was asked for and cut; '' without.
    """

    def __init__(self, engine: EngineThread, request: ServerRequest, reader: Reader) -> None:
        self.engine, self.request, self.reader = engine, request, reader
        self.events, self.tokens, self.blocks, self.reason = list[Event](), list[Token](), list[Block](), "stop"
        self.warning = ""
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        # Written by the engine's thread: events with the number of characters that they are sure of, characters after tokens.
        marks = reader.marks
        shown = frozenset(at for mark, at in engine.tokenizer.get_added_vocab().items() if mark in marks)
        self._stream = TextStream(engine.tokenizer, shown=shown)
        self._final, self._ends = list[tuple[list[Event], int]](), [0]
        self._ended: str | None = None
        request.on_change, request.stop_at, request.thought_spans = self._tell, self._take, self.thought_spans

    def thought_spans(self) -> list[tuple[int, int]]:
        """Half-open spans of the tokens of thoughts, with their marks."""
        return [(bisect_left(self._ends, start), bisect_left(self._ends, end)) for start, end in self.reader.thoughts]

    def _tell(self) -> None:
        """Wake the event loop, from the engine's thread."""
        sequence = self.request.sequence
        if sequence is not None and sequence.finish_reason is not None and self._ended is None:
            self._add(self._stream.end(), final=True, full=sequence.finish_reason in FULL)
            self._ended = sequence.finish_reason
        self._loop.call_soon_threadsafe(self._news.set)

    def _take(self, tokens: Sequence[int]) -> int | None:
        """Take the newest tokens, from the engine's thread. Gives the number of tokens before a stop text, or with the one call
        that there may be, where these show its end, so that nothing is written after it."""
        ends = self._ends
        for token in tokens[len(ends) - 1 :]:
            ends.append(ends[-1])
            self._add(self._stream.add(token))
        if self.reader.stopped_at is not None:
            return bisect_left(ends, ends[bisect_right(ends, self.reader.stopped_at) - 1])
        return len(tokens) if self.reader.ended else None

    def _add(self, piece: str, *, final: bool = False, full: bool = False) -> None:
        """Add text, up to a stop text. One that is ``full`` would have gone on."""
        if self.reader.stop is None and (piece or final):
            self._ends[-1] += len(piece)
            self._final.append((self.reader.feed(piece, final=final, cut=full), self.reader.settled))

    async def stream_blocks(self) -> AsyncIterator[tuple[Step, Block, str]]:
        """Blocks: the start of each, the pieces that extend it, and its end. Raises as ``stream_pieces``."""
        blocks = self.blocks
        async for events, _ in self.stream_pieces():
            for event in events:
                kind: Kind = "call" if event.kind == "arguments" else event.kind
                if event.kind == "call" or not blocks or blocks[-1].kind != kind:
                    if blocks:
                        yield "end", blocks[-1], ""
                    blocks.append(Block(len(blocks), kind, event.call))
                    yield "begin", blocks[-1], ""
                text = "" if event.kind == "call" else event.text if blocks[-1].text else event.text.removeprefix("\n")
                if text:
                    blocks[-1].text += text
                    yield "grow", blocks[-1], text
        if blocks:
            yield "end", blocks[-1], ""

    async def stream_pieces(self) -> AsyncIterator[tuple[list[Event], list[Token]]]:
        """Events that are sure, as the model writes them, and the tokens that begin in their text where they are asked for.

        Raises:
            ValueError: the request cannot be answered. Failed: the engine could not. Stopping: the server stops.
        """
        request, ends, spec = self.request, self._ends, self.request.spec
        echo = str(self.engine.tokenizer.decode(list(request.prompt.ids))) if spec.echoes else ""
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
            new, start = self._final[taken:], end
            events = [
                event for part, _ in new for event in part if not (spec.hides_thoughts and event.kind == "thought")
            ]
            taken, shown = taken + len(new), new[-1][1] if new else shown
            if spec.top_logprobs is not None:
                end = min(len(sequence.written), len(ends) - 1)
                end = end if ended and self.reader.stop is None else bisect_left(ends, shown, 0, end)
            hidden = self.thought_spans() if spec.hides_thoughts and end > start else []
            offsets = [at + before for at in ends[start:end]]
            told = zip(sequence.written[start:end], sequence.logprobs[start:end], offsets, strict=True)
            tokens = [one for at, one in enumerate(told, start) if not any(span[0] <= at < span[1] for span in hidden)]
            if events or tokens or (ended and echo):
                first = [Event("text", echo)] if echo else []
                piece = [*first, *events], [*(self._prompt_tokens() if echo else ()), *tokens]
                echo = ""
                self.events += piece[0]
                self.tokens += piece[1]
                yield piece
        self.reason = "length" if ended in FULL and self.reader.stop is None else "stop"
        if self.reader.calls and not self.reader.calling:
            self.reason = "tool_calls"
        if spec.must_call and self.reason == "length":
            said = f"max_tokens={spec.max_tokens} ended the answer before the call that tool_choice forces"
            self.warning = f"{said}: raise it, or simplify the tool's schema"
            LOG.warning("%s", self.warning)

    def _prompt_tokens(self) -> Iterable[Token]:
        """Tokens of the prompt, where their log-probabilities are asked for."""
        sequence, ids = self.request.sequence, list(self.request.prompt.ids)
        if sequence is None or not self.request.spec.prompt_logprobs:
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
        headers["x-max-tokens"] = str(answers[0].request.spec.max_tokens)  # they may be fewer than were asked for
        headers |= {"x-left-out": body.left_out_words} if body.left_out else {}
        kind = "text/event-stream" if body.stream else "application/json"
        super().__init__(self._chunks(), media_type=kind, headers=headers)
        self.server, self.asked, self.answers, self.answer = server, body, answers, answers[0]

    @abstractmethod
    def values(self) -> AsyncIterator[JsonObject]:
        """Events of all answers; the last one ends the reply. Raises as ``AnswerStream.stream_pieces``."""

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
        except (ValueError, Failed, Stopping) as error:
            if not begun:
                raise
            LOG.warning("an answer broke off: %s", first_line(error))  # its status has been sent
        finally:
            for answer in self.answers:
                answer.engine.cancel(answer.request)
            for task in (chunk, gone):
                task.cancel()
            await asyncio.gather(chunk, gone, return_exceptions=True)


def event(value: Mapping[str, object]) -> bytes:
    """A server-sent event. Where it has a type, that is its name. In ASCII: many clients end a line at U+2028 or U+0085 too."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()


async def left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
