"""Completions of chats and of texts: from a body to the engine's requests, and the answers, whole or as server-sent events.
Neither is silent for long.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ..naming import first_line
from ..policies import Policy
from ..policies.grammar import parse_policy
from ..runtime.sampling import Constraint
from ..runtime.tokens import TooManyTokens
from .answers import AnswerPiece, AnswerStream
from .bodies import ChatBody, CompletionBody, TextBody
from .constraint import AnswerForm, constraint
from .engine import Engine
from .errors import TOO_LONG, Failed, Refused, error_of, status_of
from .request import ServerRequest, Stopping
from .state import Server
from .tools import Call, CallReader, call_forms, declared_by, form_of

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


def usage(answers: Sequence[AnswerStream], n: int) -> dict[str, object]:
    """Tokens of a request with ``n`` answers to each prompt, as OpenAI's protocol counts them; ``locret`` has the cache's own
    figures."""
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


def add_completions(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/chat/completions`` and ``/v1/completions``."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await complete(server, request, body, "chat.completion")

    @app.post("/v1/completions")
    async def completion(body: TextBody, request: Request) -> Response:
        return await complete(server, request, body, "text_completion")


async def complete(server: Server, request: Request, body: ChatBody | TextBody, kind: str) -> Response:
    """Answer a completion, streamed or whole."""
    answers = await begin(server, request, body)
    head: dict[str, object] = {
        "id": f"{'chatcmpl' if kind[0] == 'c' else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()),
        "model": server.name,
    }  # fmt: skip
    if body.stream:
        return Streamed(answers, events(answers, body, kind, head), server.silence)

    async def whole() -> dict[str, object]:
        wholes = await asyncio.gather(*(answer.whole() for answer in answers))
        choices = [choice(kind, i, *pair) for i, pair in enumerate(zip(wholes, answers, strict=True))]
        return {**head, "object": kind, "choices": choices, "usage": usage(answers, body.n)}

    return Whole(answers, whole(), server.silence)


async def begin(server: Server, request: Request, body: ChatBody | TextBody) -> list[AnswerStream]:
    """Queue what a body asks for: its answers, ``n`` to each prompt.

    Raises:
        HTTPException, ValueError: it is refused. Busy, Stopping: see ``Engine.submit``.
    """
    engine = server.ready()
    owner = server.owner(request)
    document = None
    sampling = body.sampling(server.defaults, engine.vocabulary)
    if body.document_id is not None:
        upload = server.document(owner, body.document_id)
        if upload.document is None:
            raise Refused(409, f"document {upload.id} is {upload.shown()['status']}", "document_id")
        document = upload.document
        for name in ("budget", "policy"):
            if getattr(body, name) is not None:
                raise Refused(400, f"{name} has no effect with document_id: the document was read with its own", name)
        if sampling.repetition_penalty != 1.0 and not document.has_text:
            raise Refused(400, "repetition_penalty needs the document's text, which is not in its file")
        if engine.store is not None:
            engine.store.used(upload.id)
    bound = server.limits.answer_tokens
    wanted = 512 if body.wanted_tokens is None else body.wanted_tokens
    max_new_tokens = bound if wanted == -1 else min(wanted, bound)
    if body.best_of not in (None, body.n):
        raise Refused(400, f"best_of={body.best_of} must be n={body.n}: every answer is given", "best_of")
    top_logprobs, echoes = body.wanted_logprobs, isinstance(body, TextBody) and body.echo
    policy = allowed_policy(server, body)
    settings = engine.session_settings(body.budget)
    constrain, calls = await asyncio.to_thread(form_of_answer, engine, body)
    sampling = replace(sampling, constrain=constrain)
    where, length = "messages" if isinstance(body, ChatBody) else "prompt", server.limits.prompt_tokens
    try:
        prompts = await asyncio.to_thread(body.ids, engine.tokenizer, document, length)
    except TooManyTokens:  # in words by which clients know it that look for no code
        said = f"the prompt has more than {length} tokens: this model's maximum context length is {length} tokens"
        raise Refused(400, said, where, TOO_LONG) from None
    if not all(map(len, prompts)):
        raise Refused(400, "the prompt holds no tokens", where)
    shared_tokens = 0
    if document is None and engine.beginnings:
        shared_tokens = await asyncio.to_thread(body.shared_tokens, engine.tokenizer, prompts[0])
    seed = secrets.randbelow(2**32) if body.seed in (None, -1) else body.seed
    assert seed is not None
    if body.document_id is not None:  # from here on nothing is awaited: what is deleted later finds the requests
        server.document(owner, body.document_id)
    answers = [
        AnswerStream(
            engine,
            ServerRequest(
                ids, max_new_tokens, sampling, (seed + i) % 2**32, top_logprobs=top_logprobs, owner=owner, document=document,
                document_id=body.document_id or "", settings=settings, policy=policy, shared_tokens=shared_tokens,
                prompt_logprobs=echoes and top_logprobs is not None, parks=max_new_tokens > 0,
            ),
            body.stops, echoes=echoes, calls=calls() if calls is not None else None,
        )
        for ids in prompts for i in range(body.n)
    ]  # fmt: skip
    engine.submit(*(answer.request for answer in answers))
    return answers


def form_of_answer(
    engine: Engine, body: ChatBody | TextBody
) -> tuple[Callable[[], Constraint] | None, Callable[[], CallReader] | None]:
    """The constraint of an answer's tokens, and the reader of its calls; None for neither. An answer of a schema that need not
    call a tool may do so. Raises HTTPException 400."""
    form, declared = form_of(engine.tokenizer.chat_template), declared_by(engine.tokenizer)
    form = "declared" if declared is not None and form in ("list", "object") else form
    schema = None if body.response_format is None else body.response_format.schema_of_answer
    forms, calls = [] if schema is None else [AnswerForm(schema)], None
    if isinstance(body, ChatBody) and body.offered:
        if body.must_call or forms:
            forms = [*(() if body.must_call else forms), *call_forms(body.offered, body.called, form)]
        tools = {tool.function.name: tool.function.parameters for tool in body.tools}
        calls = partial(CallReader, form, tools, parallel=body.parallel_tool_calls, declared=declared)
    return constraint(engine.tokenizer, engine.stop_ids, forms) if forms else None, calls


def allowed_policy(server: Server, body: CompletionBody) -> Policy | None:
    """The policy that a request asks for. Raises HTTPException 400 where it is not among those that are allowed."""
    if body.policy is None:
        return None
    if body.policy not in server.policies:
        allowed = ", ".join(server.policies) or "none but the server's"
        raise HTTPException(400, f"policy={body.policy[:64]!r} is not allowed here; allowed: {allowed}")
    return parse_policy(body.policy)
