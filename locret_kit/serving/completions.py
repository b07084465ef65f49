"""Completions of chats and of texts: from a body to the engine's requests, and the answers in OpenAI's words."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial

from fastapi import FastAPI, Request
from fastapi.responses import Response
from transformers import PreTrainedTokenizerBase

from ..answers.forms import AnswerForm, answer_form
from ..answers.grammar import after_thought, call_rules, json_rule
from ..answers.reader import Call, Event, Reader
from ..engine import Thought
from ..policies.grammar import parse_policy
from ..text.tokens import TooManyTokens, token_bytes
from .answers import AnswerStream, Reply, Token
from .bodies import ChatBody, TextBody
from .constraint import Grammar, constraint, speller
from .engine_thread import EngineThread
from .messages import TOO_LONG, JsonObject, Refused, tool_call
from .request import LOG, ServerRequest
from .state import Server

ANSWER, THOUGHT = 512, 2048
"""Tokens of an answer, and of a thought before it, where a request bounds neither."""
NEAREST = 64
"""Tokens at a prompt's end where a thought may begin."""
LEAST = -9999.0
"""Log-probability of a token that cannot be, as OpenAI has it: JSON has no infinity."""


class TextReply(Reply):
    """Completions of texts; choices one after another."""

    chat, prefix, chunk, kind = False, "cmpl", "text_completion", "text_completion"
    last = "data: [DONE]\n\n"

    @cached_property
    def head(self) -> JsonObject:
        """Fields that all events share."""
        return {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.server.name}

    def choice(self, index: int, said: JsonObject, tokens: Sequence[Token] | None, reason: str | None) -> JsonObject:
        """A choice, or an event's part of it, with the fields ``said``."""
        answer = self.answers[index]
        known = tokens is not None and answer.request.top_logprobs is not None
        logprobs = logprobs_of(answer.engine.tokenizer, tokens or (), chat=self.chat) if known else None
        return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}

    async def values(self) -> AsyncIterator[JsonObject]:
        counts: JsonObject = {"usage": None} if self.asked.stream_options.include_usage else {}

        def event(
            index: int, delta: JsonObject, tokens: Sequence[Token] | None = None, reason: str | None = None
        ) -> JsonObject:
            said: JsonObject = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
            choice = self.choice(index, said, tokens, reason)
            return {**self.head, "object": self.chunk, "choices": [choice], **counts}

        for index, answer in enumerate(self.answers):
            if self.chat:
                yield event(index, {"role": "assistant", "content": ""})
            async for events, begun in answer.stream_pieces():
                tokens: Sequence[Token] | None = begun
                empty: list[JsonObject] = [{"content": ""}] if answer.request.top_logprobs is not None else []
                for delta in [delta_of(one, answer.reader.calls) for one in events] or empty:
                    yield event(index, delta, tokens)
                    tokens = None
            yield event(index, {}, None, answer.reason)
        if counts:
            yield {**self.head, "object": self.chunk, "choices": [], "usage": usage(self.answers, self.asked.n)}

    def whole(self) -> JsonObject:
        choices = []
        for index, answer in enumerate(self.answers):
            kinds = ("text", "thought")
            text, thought = ("".join(one.text for one in answer.events if one.kind == kind) for kind in kinds)
            message: JsonObject = {"role": "assistant", "content": text, **thought_fields(thought)}
            if calls := [tool_call(call.id, call.name, call.arguments) for call in answer.reader.whole_calls]:
                message |= {"content": text or None, "tool_calls": calls}
            said: JsonObject = {"message": message} if self.chat else {"text": text}
            choices.append(self.choice(index, said, answer.tokens, answer.reason))
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage(self.answers, self.asked.n)}


class ChatReply(TextReply):
    """Completions of a chat."""

    chat, prefix, chunk, kind = True, "chatcmpl", "chat.completion.chunk", "chat.completion"


def thought_fields(thought: str) -> JsonObject:
    """A thought under both of its names."""
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def delta_of(event: Event, calls: Sequence[Call]) -> JsonObject:
    """A chunk's delta for an event."""
    if event.call is None:
        return {"content": event.text} if event.kind == "text" else thought_fields(event.text)
    call: JsonObject = {"index": calls.index(event.call), "function": {"arguments": event.text}}
    if event.kind == "call":
        call |= {"id": event.call.id, "type": "function", "function": {"name": event.text, "arguments": ""}}
    return {"tool_calls": [call]}


def logprobs_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Token], *, chat: bool) -> JsonObject:
    """Log-probabilities of tokens, as completions of chats or of texts have them."""
    spell = lru_cache(lambda token: str(tokenizer.decode([token])))

    def entry(token: int, value: float) -> JsonObject:
        return {"token": spell(token), "logprob": value, "bytes": [*token_bytes(tokenizer, token)]}

    rows = [[(id, max(value, LEAST)) for id, value in row] for _, row, _ in tokens]
    if chat:
        return {"content": [{**entry(*own), "top_logprobs": [entry(*one) for one in top]} for *top, own in rows]}
    return {
        "tokens": [spell(token) for token, *_ in tokens],
        "token_logprobs": [row[-1][1] if row else None for row in rows],
        "top_logprobs": [{spell(id): value for id, value in row} or None for row in rows],
        "text_offset": [offset for *_, offset in tokens],
    }


def usage(answers: Sequence[AnswerStream], n: int = 1) -> JsonObject:
    """Tokens of a request with ``n`` answers to each prompt, as OpenAI's protocol counts them; ``locret`` has the cache's own
    figures."""
    requests = [answer.request for answer in answers]
    new = sum(len(one.sequence.tokens) for one in requests if one.sequence is not None)
    thought = sum(end - start for answer in answers for start, end in answer.thought_spans())
    prompt = sum(one.prompt_tokens for one in requests[::n])
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in requests[::n])},
        "completion_tokens_details": {"reasoning_tokens": thought},
        "locret": {"evictions": max(one.evictions for one in requests), "kept_rows": max(one.kept_rows for one in requests)},
    }  # fmt: skip


def add_completions(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/chat/completions`` and ``/v1/completions``."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return ChatReply(server, body, await begin(server, request, body))

    @app.post("/v1/completions")
    async def completion(body: TextBody, request: Request) -> Response:
        return TextReply(server, body, await begin(server, request, body))


async def begin(server: Server, request: Request, body: ChatBody | TextBody) -> list[AnswerStream]:
    """Queue a body's answers, ``n`` to each prompt.

    Raises:
        HTTPException, ValueError: the request is refused. Busy, Stopping: see ``EngineThread.submit``.
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
    form = answer_form(engine.tokenizer, tools=bool(body.tools)) if isinstance(body, ChatBody) else AnswerForm()
    bound, strict, wanted = server.limits.answer_tokens, server.limits.strict, body.max_tokens
    apart = wanted is None and form.thinks
    budget = body.thought_tokens if isinstance(body, ChatBody) and form.thinks else None
    hides = isinstance(body, ChatBody) and (body.exclude or not body.include_reasoning)
    if wanted is None:
        thought = min(THOUGHT, bound * 4 // 5) if apart else 0
        wanted, budget = min(ANSWER, bound - thought), min(budget or thought, thought) if apart else None
    elif strict and wanted > bound:
        raise Refused(400, f"max_tokens={wanted} must be at most {bound}", "max_tokens")
    max_new_tokens = bound if wanted == -1 else min(wanted, bound)
    if body.best_of not in (None, body.n):
        raise Refused(400, f"best_of={body.best_of} must be n={body.n}: every answer is given", "best_of")
    top_logprobs, echoes = body.wanted_logprobs, isinstance(body, TextBody) and body.echo
    if body.policy not in (None, *server.policies):
        allowed = ", ".join(server.policies) or "none but the server's"
        raise Refused(400, f"policy={str(body.policy)[:64]!r} is not allowed here; allowed: {allowed}")
    policy = None if body.policy is None else parse_policy(body.policy)
    settings = engine.session_settings(body.budget)
    where, length = "messages" if isinstance(body, ChatBody) else "prompt", server.limits.prompt_tokens
    try:
        prompts = await asyncio.to_thread(body.ids, engine.tokenizer, document, length)
    except TooManyTokens:  # in words by which clients know it that look for no code
        said = f"the prompt has more than {length} tokens: this model's maximum context length is {length} tokens"
        raise Refused(400, said, where, TOO_LONG) from None
    if not all(map(len, prompts)):
        raise Refused(400, "the prompt holds no tokens", where)
    begun = [isinstance(body, ChatBody) and begins_in_thought(engine.tokenizer, form, ids, body) for ids in prompts]
    constrain, reader = await asyncio.to_thread(form_of_answer, engine, body, form, begun[0])
    if body.left_out:
        body.left_out = [re.sub(r"[^\w .:/-]", "?", one, flags=re.ASCII)[:80] for one in body.left_out[:20]]
        LOG.warning("left out of a request: %s", ", ".join(body.left_out))
    sampling = replace(sampling, constrain=constrain)
    later, shared_tokens = array("i"), 0
    if form.thinks and isinstance(body, ChatBody) and not body.continued:
        later = await asyncio.to_thread(body.later, engine.tokenizer, document)
    if document is None and engine.shared_prefixes and isinstance(body, ChatBody):
        shared_tokens = await asyncio.to_thread(body.shared_tokens, engine.tokenizer, prompts[0])
    seed = secrets.randbelow(2**32) if body.seed is None or body.seed == -1 else body.seed
    if body.document_id is not None:  # from here on nothing is awaited: what is deleted later finds the requests
        server.document(owner, body.document_id)
    answers = [
        AnswerStream(
            engine,
            ServerRequest(
                ids, max_new_tokens, sampling, (seed + i) % 2**32, top_logprobs=top_logprobs, owner=owner, document=document,
                document_id=body.document_id or "", settings=settings, policy=policy, shared_tokens=shared_tokens,
                later=later, drops=engine.thoughts == "dropped" and form.thinks,
                prompt_logprobs=echoes and top_logprobs is not None, parks=max_new_tokens > 0,
                thought=None if budget is None else Thought(engine.tokenizer, opened=thinks, max_tokens=budget, apart=apart),
            ),
            reader(thinks=thinks, stops=[*filter(None, body.stop)]), echoes=echoes, hides=bool(hides),
        )
        for ids, thinks in zip(prompts, begun, strict=True) for i in range(body.n)
    ]  # fmt: skip
    engine.submit(*(answer.request for answer in answers))
    return answers


def begins_in_thought(tokenizer: PreTrainedTokenizerBase, form: AnswerForm, ids: Sequence[int], body: ChatBody) -> bool:
    """Whether an answer starts within a thought, opened by the chat template or by the continued answer."""
    last = body.messages[-1].content if body.continued else str(tokenizer.decode(list(ids[-NEAREST:])))
    if body.continued and not last:
        return form.thinks
    return form.thinks and not form.anywhere and form.opened(last, continued=body.continued)


def form_of_answer(
    engine: EngineThread, body: ChatBody | TextBody, form: AnswerForm, thinks: bool
) -> tuple[Callable[[], Grammar] | None, Callable[..., Reader]]:
    """The constraint of an answer's tokens, None for none, and its reader. An answer of a schema that need not call a tool may do
    so. Raises HTTPException 400."""
    tokenizer, response_format = engine.tokenizer, body.response_format
    schema = None if response_format is None else response_format.schema_of_answer
    reader, spell, places = partial(Reader, form), speller(tokenizer), [] if schema is None else form.places
    rules = [json_rule(schema or {}, before, after, spell) for before, after in places]
    if isinstance(body, ChatBody) and body.tools:
        tools = {tool.function.name: tool.function.parameters for tool in body.tools}
        called = {name: tools[name] for name in body.called}
        several = body.parallel_tool_calls and not isinstance(body.tool_choice, dict)
        if called or rules:
            rules = [*(() if called else rules), *call_rules(called or tools, form.calls, spell, several)]
        reader = partial(Reader, form, tools, parallel=body.parallel_tool_calls)
    if rules and form.words is not None:
        rules = after_thought(rules, form.words, thinks, spell)
    made = constraint(tokenizer, engine.stop_ids, rules, form.calls.text_end, body.left_out) if rules else None
    return made, reader
