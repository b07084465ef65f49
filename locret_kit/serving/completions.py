"""Completions of chats and of texts: from a body to the engine's requests, and the answers in OpenAI's words."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial

from fastapi import Request
from transformers import PreTrainedTokenizerBase

from ..answers.forms import AnswerForm
from ..answers.grammar import after_thought, call_rules, json_rule
from ..answers.reader import Call, Event, Reader
from ..documents.document import Document
from ..engine import Thought
from ..text.tokens import TooManyTokens, token_bytes, token_text
from .answers import AnswerStream, Reply, Token
from .bodies import ChatBody, TextBody
from .constraint import Grammar, constraint, speller
from .engine_thread import EngineThread
from .messages import TOO_LONG, JsonObject, Refused, tool_call
from .request import LOG, Prompt, ServerRequest
from .state import Server

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
        known = tokens is not None and answer.request.spec.top_logprobs is not None
        logprobs = logprobs_of(answer.engine.tokenizer, tokens or (), chat=self.chat) if known else None
        search = answer.request.search if reason is not None else None
        more: JsonObject = {} if search is None else {"evidence": [asdict(passage) for passage in search.passages]}
        more |= {"warning": answer.warning} if reason is not None and answer.warning else {}
        return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs, **more}

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
                empty: list[JsonObject] = [{"content": ""}] if answer.request.spec.top_logprobs is not None else []
                for delta in [delta_of(one, answer.reader.calls) for one in events] or empty:
                    yield event(index, delta, tokens)
                    tokens = None
            if (search := answer.request.search) is not None:  # a long text takes a while to decode
                await asyncio.to_thread(getattr, search, "passages")
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
    spell = partial(token_text, tokenizer)

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
    prompt = sum(len(one.prompt.ids) for one in requests[::n])
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in requests[::n])},
        "completion_tokens_details": {"reasoning_tokens": thought},
        "locret": {"evictions": max(one.evictions for one in requests), "kept_rows": max(one.kept_rows for one in requests)},
    }  # fmt: skip


async def begin(server: Server, request: Request, body: ChatBody | TextBody) -> list[AnswerStream]:
    """Queue a body's answers, ``n`` to each prompt.

    Raises:
        HTTPException, ValueError: the request is refused. Busy, Stopping: see ``EngineThread.submit``.
    """
    engine, owner, document_id = server.ready(), server.owner(request), body.document_id
    document = server.document_of(request, document_id)
    form, spec = body.marks(engine.tokenizer), body.resolve(server, document)
    prompts = await asyncio.to_thread(prompts_of, body, engine, document, server.limits.prompt_tokens)
    if spec.settings or spec.policy:  # what is wrong with them is told before others are waited for
        engine.spec.cache(len(prompts[0].ids), spec.settings, spec.policy)
    constrain, reader = await asyncio.to_thread(form_of_answer, engine, body, form, prompts[0].opened)
    spec = replace(spec, sampling=replace(spec.sampling, constrain=constrain))
    if body.left_out:
        LOG.warning("left out of a request: %s", body.left_out_words)
    if document_id is not None:  # from here on nothing is awaited: what is deleted later finds the requests
        server.ready_document(owner, document_id)
    most, drops = spec.thought_tokens, engine.thoughts == "dropped" and form.thinks
    new_thought = partial(Thought, engine.tokenizer, max_tokens=most, apart=spec.apart)
    requests = [
        ServerRequest(
            prompt, replace(spec, seed=(spec.seed + number) % 2**32), owner=owner, document=document,
            document_id=document_id or "", drops_thoughts=drops,
            thought=None if most is None else new_thought(opened=prompt.opened),
        )
        for prompt in prompts for number in range(body.n)
    ]  # fmt: skip
    answers = [AnswerStream(engine, one, reader(thinks=one.prompt.opened, stops=spec.stops)) for one in requests]
    engine.submit(*requests)
    return answers


def prompts_of(
    body: ChatBody | TextBody, engine: EngineThread, document: Document | None, max_tokens: int
) -> list[Prompt]:
    """The prompts of a body. Raises HTTPException, ValueError: one holds no tokens, or too many, or cannot be made."""
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    try:
        prompts = body.prompts(engine, document, max_tokens)
    except TooManyTokens:  # in words by which clients know it that look for no code
        bound = f"this model's maximum context length is {max_tokens} tokens"
        raise Refused(400, f"the prompt has more than {max_tokens} tokens: {bound}", field, TOO_LONG) from None
    if not all(len(prompt.ids) for prompt in prompts):
        raise Refused(400, "the prompt holds no tokens", field)
    return prompts


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
