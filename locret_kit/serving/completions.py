"""Completions of chats and of texts: from a body to the engine's requests, and the answer, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..policies.grammar import parse_policy
from ..policies.policy import Policy
from .answers import AnswerStream
from .bodies import ChatBody, CompletionBody, TextBody
from .errors import problem
from .replies import choice, events, usage
from .request import ServerRequest
from .state import Server


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
    engine = server.ready()
    owner = await server.asks(request, body.document_id)
    document = None
    if body.document_id is not None:
        upload = server.document(owner, body.document_id)
        if upload.document is None:
            return problem(409, f"document {upload.id} is {upload.shown()['status']}", "document_id")
        document = upload.document
        for name in ("budget", "policy"):
            if getattr(body, name) is not None:
                return problem(400, f"{name} has no effect with document_id: the document was read with its own", name)
        if body.repetition_penalty != 1.0 and not document.has_text:
            return problem(400, "repetition_penalty needs the document's text, which is not in its file")
        if engine.store is not None:
            engine.store.used(upload.id)
    bound = server.limits.answer_tokens
    max_new_tokens = body.wanted_tokens or min(512, bound)
    if max_new_tokens > bound:
        return problem(400, f"max_tokens={max_new_tokens} must be at most {bound}", "max_tokens")
    top_logprobs = body.wanted_logprobs
    policy = allowed_policy(server, body)
    settings = engine.session_settings(body.budget)
    ids = await asyncio.to_thread(body.ids, engine.tokenizer, document)
    if not 0 < len(ids) <= server.limits.prompt_tokens:
        return problem(
            400, f"the prompt has {len(ids)} tokens, at most {server.limits.prompt_tokens} are taken", "messages"
        )
    shared_tokens = 0
    if document is None and engine.beginnings:
        shared_tokens = await asyncio.to_thread(body.shared_tokens, engine.tokenizer, ids)
    seed = secrets.randbelow(2**32) if body.seed is None else body.seed
    answers = [
        AnswerStream(
            engine,
            ServerRequest(
                ids, max_new_tokens, body.sampling, (seed + i) % 2**32, top_logprobs=top_logprobs, owner=owner, document=document,
                document_id=body.document_id or "", settings=settings, policy=policy, shared_tokens=shared_tokens,
            ),
            body.stops,
        )
        for i in range(body.n)
    ]  # fmt: skip
    engine.submit(*(answer.request for answer in answers))
    head = {"id": f"{'chatcmpl' if kind[0] == 'c' else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time())}
    head |= {"model": server.name}
    if body.stream:
        return Streamed(answers, events(answers, body, kind, head))
    try:
        done = await unless_gone(request, asyncio.gather(*(answer.whole() for answer in answers)))
        if done is None:
            return problem(499, "the client has gone")
    finally:
        for answer in answers:
            answer.leave()
    choices = [
        choice(kind, i, text, answer.reason, answer.logprobs(kind, 0, answer.shown_tokens))
        for i, (text, answer) in enumerate(zip(done, answers, strict=True))
    ]
    return JSONResponse({**head, "object": kind, "choices": choices, "usage": usage(answers)})


def allowed_policy(server: Server, body: CompletionBody) -> Policy | None:
    """The policy that a request asks for. Raises HTTPException 400 where it is not among those that are allowed."""
    if body.policy is None:
        return None
    if body.policy not in server.policies:
        allowed = ", ".join(server.policies) or "none but the server's"
        raise HTTPException(400, f"policy={body.policy[:64]!r} is not allowed here; allowed: {allowed}")
    return parse_policy(body.policy)


async def unless_gone(request: Request, work: asyncio.Future[list[str]]) -> list[str] | None:
    """The result of ``work``; None where the client goes away before."""
    while not work.done():
        await asyncio.wait([work], timeout=0.2)
        if not work.done() and await request.is_disconnected():
            work.cancel()
            return None
    return work.result()


class Streamed(StreamingResponse):
    """Events of answers, which end with it, also where the client goes before the first."""

    def __init__(self, answers: Sequence[AnswerStream], events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self.answers:
                answer.leave()
