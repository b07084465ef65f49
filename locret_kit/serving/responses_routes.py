"""OpenAI's ``/v1/responses``: its bodies as those of chat completions, and the answers in its form. Responses are not stored;
items of answers are remembered, for requests that name them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import count

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import model_validator

from ..naming import first_line
from .answers import AnswerStream
from .bodies import ChatBody
from .completions import Streamed, Whole, begin, named_event, usage
from .errors import Failed, checked
from .messages import JsonObject, without_nulls
from .request import Stopping
from .state import Server
from .tools import Call

PASSED = (
    "model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "top_k", "min_p", "seed", "document_id",
    "budget", "policy", "chat_template_kwargs",
)  # fmt: skip
"""Fields that mean the same in both protocols, or that are this server's own."""
NOT_HERE = {
    "previous_response_id": "nothing is stored here: send the whole conversation as input",
    "conversation": "nothing is stored here: send the whole conversation as input",
    "prompt": "nothing is stored here: send the prompt as input",
    "background": "an answer ends with its request",
    "top_logprobs": "log-probabilities are in /v1/chat/completions",
}
"""Fields that are refused, and why."""
ECHOED: dict[str, object] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a request that its answer repeats, and their defaults."""


class ResponsesBody(ChatBody):
    """``POST /v1/responses``."""

    _translate = model_validator(mode="before")(lambda body: chat_fields(body) if isinstance(body, dict) else body)


def chat_fields(body: JsonObject) -> JsonObject:
    """The body of a chat completion that asks for the same. What has another type than it should stays, for its checks to say so.

    Raises:
        ValueError: it asks for what is not here.
    """
    for name, why in NOT_HERE.items():
        if body.get(name):
            raise ValueError(f"{name} is not supported: {why}")
    if isinstance(include := body.get("include"), list) and "message.output_text.logprobs" in include:
        raise ValueError(f"message.output_text.logprobs is not supported: {NOT_HERE['top_logprobs']}")
    fields = {name: body[name] for name in PASSED if name in body}
    given, instructions = body.get("input"), body.get("instructions")
    messages: object = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if isinstance(given, list):
        messages = messages_of(given)
    if isinstance(messages, list) and instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    fields |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens")}
    if isinstance(reasoning := body.get("reasoning"), dict):
        fields["reasoning_effort"] = reasoning.get("effort")
    if isinstance(tools := body.get("tools"), list):
        fields["tools"] = [
            {"type": tool.get("type"), "function": without_nulls(tool)} if isinstance(tool, dict) else tool
            for tool in tools
        ]
    if isinstance(text := body.get("text"), dict) and isinstance(form := text.get("format"), dict):
        schema = {"json_schema": {"schema": form.get("schema")}} if form.get("type") == "json_schema" else {}
        fields["response_format"] = {"type": form.get("type"), **schema}
    return fields


def messages_of(items: list[object]) -> list[JsonObject]:
    """Messages of a chat completion; calls of one answer stand in one message. Raises ValueError for items of other types."""
    made, calls = list[JsonObject](), list[JsonObject]()
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"input.{number}: must be an object")
        kind = item.get("type") or "message"
        if kind == "message":
            calls = []
            made.append({"role": item.get("role"), "content": item.get("content"), "tool_calls": calls})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not made or made[-1]["role"] != "assistant":
                calls = []
                made.append({"role": "assistant", "tool_calls": calls})
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise ValueError(f"input.{number}: type {str(kind)[:40]!r} is not supported")
    return made


def add_responses(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/responses``."""

    @app.post("/v1/responses")
    async def respond(asked: JsonObject, request: Request) -> Response:
        owner = server.owner(request)
        body = checked(ResponsesBody, {**asked, "input": server.items.resolved(owner, asked.get("input"))})
        (answer,) = await begin(server, request, body)

        def keep(items: Sequence[JsonObject]) -> None:
            if asked.get("store") is not False:
                server.items.add(owner, items)

        head: dict[str, object] = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()), "model": server.name,
            "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None, "store": False,
            "previous_response_id": None, "background": False,
            **{name: default if asked.get(name) is None else asked[name] for name, default in ECHOED.items()},
        }  # fmt: skip
        if body.stream:
            return Streamed([answer], events(answer, head, keep), server.silence)

        async def whole() -> dict[str, object]:
            parts = await answer.whole_blocks()
            items = items_of(answer, [*map(new_name, parts)], parts)
            keep(items)
            return {**head, **end_of(answer), "output": items}

        return Whole([answer], whole(), server.silence)


def new_name(part: str | Call) -> str:
    """A name for an item of an answer."""
    return f"{'msg' if isinstance(part, str) else 'fc'}_{secrets.token_hex(12)}"


def text_part(text: str) -> dict[str, object]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_of(name: str, part: str | Call) -> dict[str, object]:
    """An item of an answer's output."""
    head = {"id": name, "status": "completed"}
    if isinstance(part, str):
        return {**head, "type": "message", "role": "assistant", "content": [text_part(part)]}
    return {**head, "type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.arguments}


def items_of(answer: AnswerStream, names: Sequence[str], parts: Sequence[str | Call]) -> list[dict[str, object]]:
    """An answer's output, when it has ended: where it was cut, its last item is incomplete."""
    items = [item_of(*pair) for pair in zip(names, parts, strict=True)]
    if items and answer.reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def end_of(answer: AnswerStream) -> dict[str, object]:
    """What is known at an answer's end."""
    tokens = usage([answer], 1)
    cut, cached = answer.reason == "length", answer.request.cached_tokens
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": tokens["prompt_tokens"], "output_tokens": tokens["completion_tokens"],
            "total_tokens": tokens["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0}, "locret": tokens["locret"],
        },
    }  # fmt: skip


async def events(
    answer: AnswerStream, head: dict[str, object], keep: Callable[[Sequence[JsonObject]], None]
) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer, whose items ``keep`` gets."""
    numbers = count()
    names: list[str] = []
    made: list[str | Call] = []

    def event(kind: str, **fields: object) -> str:
        return named_event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

    def begin_item(part: str | Call) -> Iterator[str]:
        names.append(new_name(part))
        empty: dict[str, object] = {"content": []} if isinstance(part, str) else {"arguments": ""}
        item = {**item_of(names[-1], part), "status": "in_progress", **empty}
        yield event("output_item.added", output_index=len(made), item=item)
        if isinstance(part, str):
            yield event("content_part.added", **place(len(made)), content_index=0, part=text_part(""))

    def end_item() -> Iterator[str]:
        index = len(made) - 1
        part = made[index]
        if isinstance(part, str):
            yield event("output_text.done", **place(index), content_index=0, text=part, logprobs=[])
            yield event("content_part.done", **place(index), content_index=0, part=text_part(part))
        else:
            yield event("function_call_arguments.done", **place(index), name=part.name, arguments=part.arguments)
        yield event("output_item.done", output_index=index, item=items_of(answer, names, made)[index])

    def place(index: int) -> dict[str, object]:
        return {"item_id": names[index], "output_index": index}

    try:
        yield event("created", response=head)
        yield event("in_progress", response=head)
        async for index, part in answer.blocks():
            if index == len(made):
                for one in [*(end_item() if made else ()), *begin_item(part)]:
                    yield one
                made.append("" if isinstance(part, str) else part)
            if isinstance(part, str):
                made[index] = f"{made[index]}{part}"
                yield event("output_text.delta", **place(index), content_index=0, delta=part, logprobs=[])
            else:
                yield event("function_call_arguments.delta", **place(index), delta=part.arguments)
        for one in end_item() if made else ():
            yield one
        end = end_of(answer)
        yield event(str(end["status"]), response={**head, **end, "output": items_of(answer, names, made)})
    except (ValueError, Failed, Stopping) as error:
        code = "invalid_prompt" if isinstance(error, ValueError) else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": first_line(error)}}
        yield event("failed", response={**head, **failed})
    finally:  # also where the client leaves before the end
        keep([item_of(*pair) for pair in zip(names, made, strict=False)])
