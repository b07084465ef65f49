"""Anthropic's ``/v1/messages``: its bodies as those of chat completions, and the answers in its form."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from ..naming import first_line
from .answers import AnswerStream
from .bodies import ChatBody, Tokens
from .completions import Streamed, Whole, begin, named_event, usage
from .errors import ANTHROPIC, Failed, Refused, error_of, status_of
from .information import MAX_TOKENS
from .messages import JsonObject, without_nulls
from .request import Stopping
from .state import Server
from .tools import Call

PASSED = (
    "model", "stream", "max_tokens", "temperature", "top_p", "top_k", "document_id", "budget", "policy", "seed", "thread",
    "thinking", "chat_template_kwargs",
)  # fmt: skip
"""Fields that mean the same in both protocols, or that are this server's own."""
NO_THREADS = "thread_unsupported_request"
"""Code at which Anthropic's clients go on without threads, and send whole conversations."""
THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that chat templates have no place for."""
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(ChatBody):
    """``POST /v1/messages/count_tokens``."""

    _translate = model_validator(mode="before")(lambda body: chat_fields(body) if isinstance(body, dict) else body)


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: Tokens
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    thread: object = None
    """A conversation that the server would hold, of which clients then send the newest messages alone."""


def chat_fields(body: JsonObject) -> JsonObject:
    """The body of a chat completion that asks for the same. What has another type than it should stays, for its checks to say so.

    Raises:
        ValueError: it asks for what is not here.
    """
    for name in ("mcp_servers", "container"):
        if body.get(name):
            raise ValueError(f"{name} is not supported")
    fields = {name: body[name] for name in PASSED if name in body}
    messages, system = body.get("messages"), body.get("system")
    if isinstance(messages, list):
        messages = [inner for message in messages for inner in messages_of(message)]
        if system:
            messages.insert(0, {"role": "system", "content": system})
    fields |= {"messages": messages, "stop": body.get("stop_sequences")}
    if isinstance(tools := body.get("tools"), list):
        fields["tools"] = [tool_of(number, tool) for number, tool in enumerate(tools)]
    if isinstance(choice := body.get("tool_choice"), dict):
        kind = choice.get("type")
        fields["tool_choice"] = CHOICES.get(str(kind), {"type": "function", "name": choice.get("name")})
        fields["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, dict) else None
    if form is None:
        form = body.get("output_format")  # of clients from before output_config
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) else None
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return fields


def messages_of(message: object) -> list[object]:
    """The messages of a chat completion that one of Anthropic's is: results of tools, then the rest."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return [message]
    texts, calls, results = list[object](), list[JsonObject](), list[object]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content") or ""
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind not in THOUGHTS:
            texts.append(block)
    said = {"role": message.get("role"), "content": texts, "tool_calls": calls}
    return [*results, said] if texts or calls or not results else results


def tool_of(number: int, tool: object) -> object:
    """A tool of a chat completion. Raises ValueError for one that Anthropic's servers run."""
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") not in (None, "custom"):
        raise ValueError(f"tools.{number}: type {str(tool['type'])[:40]!r} is not supported, only tools of your own")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": without_nulls(function)}


def add_anthropic(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    @app.post(ANTHROPIC)
    async def message(body: MessagesBody, request: Request) -> Response:
        if body.thread is not None:
            raise Refused(400, "thread is not supported: send the whole conversation", "thread", NO_THREADS)
        (answer,) = await begin(server, request, body)
        head: dict[str, object] = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": server.name, "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip
        if body.stream:
            return Streamed([answer], events(answer, head), server.silence)

        async def whole() -> dict[str, object]:
            content = [block_of(part) for part in await answer.whole_blocks()]
            return {**head, "content": content, **end_of(answer), "usage": tokens_of(answer)}

        return Whole([answer], whole(), server.silence)

    @app.post(f"{ANTHROPIC}/count_tokens")
    async def count(body: CountBody, request: Request) -> dict[str, int]:
        server.owner(request)
        (ids,) = await asyncio.to_thread(body.ids, server.ready().tokenizer, None, MAX_TOKENS)
        return {"input_tokens": len(ids)}


def block_of(part: str | Call) -> dict[str, object]:
    """A block of an answer's content."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.values}


def end_of(answer: AnswerStream) -> dict[str, object]:
    """Why an answer ended."""
    reason = "stop_sequence" if answer.stop_text is not None else REASONS[answer.reason]
    return {"stop_reason": reason, "stop_sequence": answer.stop_text}


def tokens_of(answer: AnswerStream) -> dict[str, object]:
    """Tokens of a request: of the prompt, those that were read for it, and apart from them those that were not read again."""
    cached = answer.request.cached_tokens
    tokens = usage([answer], 1)
    return {
        "input_tokens": len(answer.request.ids) - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": tokens["completion_tokens"], "locret": tokens["locret"],
    }  # fmt: skip


async def events(answer: AnswerStream, head: JsonObject) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer."""

    def event(kind: str, **fields: object) -> str:
        return named_event({"type": kind, **fields})

    try:
        begun = {"input_tokens": len(answer.request.ids), "output_tokens": 0}
        yield event("message_start", message={**head, "usage": begun})
        index = -1
        async for number, part in answer.blocks():
            if number > index:
                if index >= 0:
                    yield event("content_block_stop", index=index)
                index = number
                empty: dict[str, object] = {"text": ""} if isinstance(part, str) else {"input": {}}
                yield event("content_block_start", index=number, content_block={**block_of(part), **empty})
            if isinstance(part, str):
                delta = {"type": "text_delta", "text": part}
            else:
                delta = {"type": "input_json_delta", "partial_json": json.dumps(part.values, ensure_ascii=False)}
            yield event("content_block_delta", index=number, delta=delta)
        if index >= 0:
            yield event("content_block_stop", index=index)
        yield event("message_delta", delta=end_of(answer), usage=tokens_of(answer))
        yield event("message_stop")
    except (ValueError, Failed, Stopping) as error:
        yield named_event(error_of(status_of(error), first_line(error), path=ANTHROPIC))
