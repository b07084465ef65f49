"""OpenAI's ``/v1/responses``: its bodies as those of chat completions, and the answers in its form. Responses are not stored;
items of answers are remembered, for requests that name them.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count

from pydantic import model_validator

from ..answers.values import check_json, nested
from ..naming import first_line, prefixed_errors
from .answers import AnswerStream, Reply
from .bodies import ChatBody
from .completions import usage
from .messages import RESPONSES, JsonObject, Message, fields_of, placed, refuse, system_of, tool_call
from .state import Server

NOT_HERE = {
    "previous_response_id": ": nothing is stored here: send the whole conversation as input",
    "conversation": ": nothing is stored here: send the whole conversation as input",
    "prompt": ": nothing is stored here: send the prompt as input",
    "background": ": an answer ends with its request",
    "top_logprobs": ": log-probabilities are in /v1/chat/completions",
    "evidence": ": passages are in /v1/chat/completions",
}
"""Fields that are refused, and why."""
ECHOED: dict[str, object] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a request that its answer repeats, and their defaults."""


OUTPUTS = ("function_call_output", "custom_tool_call_output")
"""Items of results that are texts; of others they are objects."""


class ResponsesBody(ChatBody):
    """``POST /v1/responses``."""

    store: object = None
    """Whether items are remembered: false for not."""
    echoed: JsonObject
    """Fields that the answer repeats."""
    _translate = model_validator(mode="before")(lambda body: chat_fields(body) if isinstance(body, dict) else body)


def chat_fields(body: JsonObject) -> JsonObject:
    """Body of the equivalent chat completion. A value of a wrong type is kept, so that the body's own checks report it.

    Raises:
        ValueError: the body asks for an unsupported feature.
    """
    refuse(body, NOT_HERE)
    if isinstance(include := body.get("include"), list) and "message.output_text.logprobs" in include:
        raise ValueError(f"message.output_text.logprobs is not supported{NOT_HERE['top_logprobs']}")
    fields, given = fields_of(RESPONSES, body), body.get("input")
    fields["messages"] = items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if isinstance(items, list):
        left_out = set[str]()
        fields["messages"] = [*system_of(body, "instructions"), *messages_of(items, left_out)]
        fields["left_out"] = left_out
    echoed = {name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()}
    for name, value in echoed.items():
        with prefixed_errors(name, ValueError, RecursionError):
            check_json(value)
    return {**fields, "echoed": echoed}


def messages_of(items: list[object], left_out: set[str]) -> list[Message]:
    """Messages of a chat completion; calls of one answer stand in one message. Calls of other kinds that the client has
    answered are calls as well; other items, such as web searches, are ``left_out``. Raises Refused for a wrong message."""
    made, calls, thought = list[JsonObject](), list[JsonObject](), ""
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"input.{number}: must be an object")
        kind = str(item.get("type") or "message")
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            thought += "".join(str(nested(part, "text") or "") for part in parts) if isinstance(parts, list) else ""
            continue
        if kind == "message":
            calls = []
            made.append({"role": item.get("role"), "content": item.get("content"), "tool_calls": calls})
        elif kind == "function_call" or (kind.endswith("_call") and item.get("call_id")):
            if thought or not made or made[-1]["role"] != "assistant":
                calls = []
                made.append({"role": "assistant", "tool_calls": calls})
            said = item.get("arguments", item.get("action", {"input": item.get("input")}))
            name = item.get("name", None if kind == "function_call" else kind.removesuffix("_call"))
            calls.append(tool_call(item.get("call_id"), name, said))
        elif kind.endswith("_call_output"):
            output = item.get("output")
            output = output if kind in OUTPUTS or isinstance(output, str) else json.dumps(output)
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            left_out.add(f"item {kind}")
            continue
        made[-1].setdefault("place", f"input.{number}")
        if thought and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = thought
        thought = ""
    return [placed(str(one.pop("place")), one) for one in made]


class ResponseReply(Reply):
    """A response; its items are remembered, unless ``store`` is false."""

    asked: ResponsesBody

    def __init__(self, server: Server, body: ResponsesBody, answers: Sequence[AnswerStream]) -> None:
        super().__init__(server, body, answers)
        self.names, self.numbers = list[str](), count()
        self.head: JsonObject = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()), "model": server.name,
            "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None, "store": False,
            "previous_response_id": None, "background": False, **body.echoed,
        }  # fmt: skip

    def event(self, kind: str, **fields: object) -> JsonObject:
        """An event of a kind."""
        return {"type": f"response.{kind}", "sequence_number": next(self.numbers), **fields}

    def items(self) -> list[JsonObject]:
        """The output; where the answer was cut, its last item is incomplete."""
        items = list[JsonObject]()
        for name, block in zip(self.names, self.answer.blocks, strict=True):
            item: JsonObject = {"type": "message", "role": "assistant", "content": [text_part(block.text)]}
            if block.kind == "thought":
                item = {"type": "reasoning", "summary": [], "content": [thought_part(block.text)]}
            elif (call := block.call) is not None:
                item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": block.text}
            items.append({"id": name, "status": "completed"} | item)
        if items and self.answer.reason == "length":
            items[-1]["status"] = "incomplete"
        return items

    async def values(self) -> AsyncIterator[JsonObject]:
        event = self.event
        try:
            yield event("created", response=self.head)
            yield event("in_progress", response=self.head)
            async for step, block, piece in self.answer.stream_blocks():
                short, empty, part, delta, done = KINDS[block.kind]
                if step == "begin":
                    self.names.append(f"{short}_{secrets.token_hex(12)}")
                    item = {**self.items()[-1], "status": "in_progress", **empty}
                    yield event("output_item.added", output_index=block.index, item=item)
                place: JsonObject = {"item_id": self.names[block.index], "output_index": block.index}
                place |= {} if part is None else {"content_index": 0}
                more: JsonObject = {"logprobs": []} if block.kind == "text" else {}
                if step == "grow":
                    yield event(f"{delta}.delta", **place, delta=piece, **more)
                elif step == "begin" and part is not None:
                    yield event("content_part.added", **place, part=part(""))
                elif step == "end":
                    more |= {} if block.call is None else {"name": block.call.name}
                    yield event(f"{delta}.done", **place, **{done: block.text}, **more)
                    if part is not None:
                        yield event("content_part.done", **place, part=part(block.text))
                    yield event("output_item.done", output_index=block.index, item=self.items()[block.index])
            end = self.whole()
            yield event(str(end["status"]), response=end)
        finally:  # also where the client leaves before the end
            if self.asked.store is not False:
                self.server.items.add(self.answer.request.owner, self.items())

    def whole(self) -> JsonObject:
        tokens, cut = usage(self.answers), self.answer.reason == "length"
        cached = {"cached_tokens": self.answer.request.cached_tokens, "cache_write_tokens": 0}
        return {
            **self.head, "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "output": self.items(),
            "usage": {
                "input_tokens": tokens["prompt_tokens"], "output_tokens": tokens["completion_tokens"],
                "total_tokens": tokens["total_tokens"], "output_tokens_details": tokens["completion_tokens_details"],
                "input_tokens_details": cached, "locret": tokens["locret"],
            },
        }  # fmt: skip

    def failed(self, error: Exception) -> JsonObject:
        code = "invalid_prompt" if isinstance(error, ValueError) else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": first_line(error)}}
        return self.event("failed", response={**self.head, **failed})


def text_part(text: str) -> JsonObject:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_part(text: str) -> JsonObject:
    """The content of a thought."""
    return {"type": "reasoning_text", "text": text}


KINDS: dict[str, tuple[str, JsonObject, Callable[[str], JsonObject] | None, str, str]] = {
    "text": ("msg", {"content": []}, text_part, "output_text", "text"),
    "thought": ("rs", {"content": []}, thought_part, "reasoning_text", "text"),
    "call": ("fc", {"arguments": ""}, None, "function_call_arguments", "arguments"),
}
"""Start of the name of each kind of item, its initial fields, its content, and the words of its events."""
