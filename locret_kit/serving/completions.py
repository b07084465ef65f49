"""Completions of chats and of texts: from a body to the engine's requests, and the answer, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from ..policies.grammar import parse_policy
from ..policies.policy import Policy
from ..runtime.sampling import Constraint
from ..runtime.tokens import TooManyTokens
from .answers import AnswerStream
from .bodies import ChatBody, CompletionBody, TextBody
from .constraint import AnswerForm, constraint
from .engine import Engine
from .errors import TOO_LONG, Refused
from .replies import Streamed, Whole, choice, events, usage
from .request import ServerRequest
from .state import Server
from .tools import CallReader, call_forms, declared_by, form_of


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
