"""Answers as OpenAI's protocol has them, whole and as server-sent events. Neither is silent for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TypedDict

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ..naming import first_line
from .answers import AnswerPiece, AnswerStream
from .bodies import CompletionBody
from .errors import Failed, error_of, status_of
from .request import Stopping
from .tools import Call

Logprobs = dict[str, object] | None
COMMENT = ": waiting\n\n"
"""An event that says nothing: clients leave it out."""


async def events(
    answers: Sequence[AnswerStream], body: CompletionBody, kind: str, head: dict[str, object]
) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer; choices one after another."""
    name = "chat.completion.chunk" if kind == "chat.completion" else kind
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    extra = {"usage": None} if wants_usage else {}

    def event(*choices: dict[str, object]) -> str:
        value = {**head, "object": name, "choices": list(choices), **extra}
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    try:
        for i, answer in enumerate(answers):
            if kind == "chat.completion":
                yield event(delta(kind, i, "", None, first=True))
            number, echoed, echo_logprobs = 0, answer.echoed, answer.echo_logprobs
            async for piece in answer.pieces():
                values = joined(echo_logprobs() if echoed else None, answer.logprobs(kind, piece.start, piece.end))
                if (text := echoed + piece.text) or values is not None:
                    yield event(delta(kind, i, text, None, values))
                for call in piece.calls:
                    yield event(called(i, call, number))
                    number += 1
                echoed = ""
            if echoed:
                yield event(delta(kind, i, echoed, None, echo_logprobs()))
            yield event(delta(kind, i, "", answer.reason, last=True))
        if wants_usage:
            value = {**head, "object": name, "choices": [], "usage": usage(answers, body.n)}
            yield f"data: {json.dumps(value)}\n\n"
        yield "data: [DONE]\n\n"
    except (ValueError, Failed, Stopping) as error:  # with the type that a whole answer's error has
        yield f"data: {json.dumps(error_of(status_of(error), first_line(error)))}\n\n"


def named_event(value: Mapping[str, object]) -> str:
    """A server-sent event that has its type as its name."""
    return f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"


def called(index: int, call: Call, number: int) -> dict[str, object]:
    """One choice of an event: a call of a tool."""
    return {
        "index": index, "delta": {"tool_calls": [{"index": number, **call.shown()}]}, "finish_reason": None, "logprobs": None,
    }  # fmt: skip


def joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """Log-probabilities of a prompt and of what follows it."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}  # type: ignore[misc]


def choice(kind: str, index: int, whole: AnswerPiece, answer: AnswerStream) -> dict[str, object]:
    """One choice of a whole answer."""
    values, end = answer.logprobs(kind, whole.start, whole.end), {"finish_reason": answer.reason}
    if kind != "chat.completion":
        values = joined(answer.echo_logprobs(), values)
        return {"index": index, "text": answer.echoed + whole.text, **end, "logprobs": values}
    message: dict[str, object] = {"role": "assistant", "content": whole.text}
    if whole.calls:
        message |= {"content": whole.text.strip() or None, "tool_calls": [call.shown() for call in whole.calls]}
    return {"index": index, "message": message, **end, "logprobs": values}


def delta(
    kind: str, index: int, text: str, reason: str | None, logprobs: Logprobs = None, *,
    first: bool = False, last: bool = False,
) -> dict[str, object]:  # fmt: skip
    """One choice of an event."""
    end: dict[str, object] = {"finish_reason": reason, "logprobs": logprobs}
    if kind != "chat.completion":
        return {"index": index, "text": text, **end}
    said: dict[str, str] = {} if last else {"content": text}
    return {"index": index, "delta": {"role": "assistant", **said} if first else said, **end}


class Usage(TypedDict):
    """Tokens of a request, as OpenAI's protocol counts them; ``locret`` has the cache's own figures."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    locret: dict[str, int]


def usage(answers: Sequence[AnswerStream], n: int) -> Usage:
    """Tokens of a request with ``n`` answers to each prompt."""
    requests = [answer.request for answer in answers]
    new = sum(len(one.sequence.tokens) for one in requests if one.sequence is not None)
    prompt = sum(len(one.ids) for one in requests[::n])
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in requests[::n])},
        "locret": {"evictions": max(one.evictions for one in requests), "kept_rows": max(one.kept_rows for one in requests)},
    }  # fmt: skip


async def with_comments(events: AsyncIterator[str], seconds: float) -> AsyncIterator[str]:
    """Events, with a comment after every ``seconds`` without one."""
    next_one: asyncio.Future[str] | None = None
    try:
        while True:
            next_one = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
            while not (await asyncio.wait({next_one}, timeout=seconds))[0]:
                yield COMMENT
            try:
                event = next_one.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if next_one is not None:
            next_one.cancel()


def given(answers: Sequence[AnswerStream]) -> dict[str, str]:
    """A header with the most tokens that an answer may have, which may be fewer than were asked for."""
    return {"x-max-tokens": str(answers[0].request.max_new_tokens)}


class Streamed(StreamingResponse):
    """Events of answers, which end with it, also where the client goes before the first."""

    def __init__(self, answers: Sequence[AnswerStream], events: AsyncIterator[str], seconds: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **given(answers)}
        super().__init__(with_comments(events, seconds), media_type="text/event-stream", headers=headers)
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self.answers:
                answer.leave()


class Whole(Response):
    """A whole answer, which ends where the client goes. After ``seconds`` its status and headers are sent, and then a line's end
    after every ``seconds``, which JSON may begin with. What fails after that breaks the connection off.
    """

    def __init__(
        self, answers: Sequence[AnswerStream], work: Coroutine[None, None, dict[str, object]], seconds: float
    ) -> None:
        super().__init__(media_type="application/json")
        self.answers, self.work, self.seconds = answers, work, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, gone = asyncio.ensure_future(self.work), asyncio.ensure_future(left(receive))
        started = False
        try:
            while not work.done():
                await asyncio.wait({work, gone}, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not work.done():
                    if not started:
                        headers = {"content-type": "application/json", **given(self.answers)}
                        await send({"type": "http.response.start", "status": 200, "headers": Headers(headers).raw})
                        started = True
                    await send({"type": "http.response.body", "body": b"\n", "more_body": True})
            result = work.result()
            if not started:
                await JSONResponse(result, headers=given(self.answers))(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": JSONResponse(result).body})
        finally:
            for answer in self.answers:
                answer.leave()
            for task in (work, gone):
                task.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await asyncio.gather(work, gone, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
