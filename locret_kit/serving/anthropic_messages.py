"""Anthropic's ``/v1/messages``: its bodies as those of chat completions, and the answers in its form."""

import secrets
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Annotated

from pydantic import Field, model_validator

from ..answers.values import nested
from .answers import Block, Reply
from .bodies import ChatBody, Tokens
from .completions import usage
from .messages import ANTHROPIC, JsonObject, fields_of, placed, refuse, system_of, tool_call

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
FAILED = "The tool failed:\n"
"""Text before the result of a tool that failed."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(ChatBody):
    """``POST /v1/messages/count_tokens``."""

    _translate = model_validator(mode="before")(lambda body: chat_fields(body) if isinstance(body, dict) else body)


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: Tokens
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    thread: object = None
    """A conversation held by the server, so that clients send only the newest messages."""


def chat_fields(body: JsonObject) -> JsonObject:
    """Body of the equivalent chat completion. A value of a wrong type is kept, so that the body's own checks report it.

    Raises:
        ValueError: the body asks for an unsupported feature.
    """
    refuse(body, {"mcp_servers": "", "container": "", "evidence": ": passages are in /v1/chat/completions"})
    fields = fields_of(ANTHROPIC, body)
    if isinstance(given := fields.get("messages"), list):
        left_out = set[str]()
        messages = [
            placed(f"messages.{at}", one) for at, message in enumerate(given) for one in messages_of(message, left_out)
        ]
        fields["left_out"] = left_out
        fields["messages"] = [*system_of(body, "system"), *messages]
    if isinstance(choice := body.get("tool_choice"), dict):
        kind = choice.get("type")
        fields["tool_choice"] = CHOICES.get(str(kind), {"type": "function", "name": choice.get("name")})
        fields["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return fields


def messages_of(message: object, left_out: set[str]) -> list[object]:
    """The messages of a chat completion that one of Anthropic's is: results of tools, then the rest. Blocks of tools that run at
    Anthropic are ``left_out``."""
    if not isinstance(content := nested(message, "content"), list):
        return [message]
    texts, calls, results, thought = list[object](), list[object](), list[object](), ""
    for block in content:
        kind = nested(block, "type")
        if kind == "tool_use":
            calls.append(tool_call(nested(block, "id"), nested(block, "name"), nested(block, "input")))
        elif kind == "tool_result":
            result = nested(block, "content") or ""
            if nested(block, "is_error"):  # which no template has a place for
                result = [FAILED, *(result if isinstance(result, list) else [result])]
            results.append({"role": "tool", "tool_call_id": nested(block, "tool_use_id"), "content": result})
        elif kind == "thinking":
            thought += str(nested(block, "thinking") or "")
        elif str(kind).endswith(("_tool_use", "_tool_result")):
            left_out.add(f"block {kind}")
        elif kind != "redacted_thinking":  # in a cipher of Anthropic's
            texts.append(block)
    said = {"role": nested(message, "role"), "content": texts, "tool_calls": calls}
    said |= {"reasoning_content": thought} if thought else {}
    return [*results, said] if texts or calls or not results else results


class MessageReply(Reply):
    """A message."""

    path = ANTHROPIC

    @cached_property
    def head(self) -> JsonObject:
        """Fields known before the answer."""
        return {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": self.server.name,
            "content": [], "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    async def values(self) -> AsyncIterator[JsonObject]:
        begun = {"input_tokens": len(self.answer.request.prompt.ids), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self.head, "usage": begun}}
        async for step, block, piece in self.answer.stream_blocks():
            place = {"index": block.index}
            if step == "begin":
                yield {"type": "content_block_start", **place, "content_block": block_of(block)}
            elif step == "grow":
                kind, name = DELTAS[block.kind]
                if block.call is not None and block.text == piece:  # of arguments that are no object, an empty one
                    piece = piece if piece.lstrip().startswith("{") else "{}"
                yield {"type": "content_block_delta", **place, "delta": {"type": kind, name: piece}}
            else:
                if block.kind == "thought":
                    signature = {"type": "signature_delta", "signature": SIGNATURE}
                    yield {"type": "content_block_delta", **place, "delta": signature}
                yield {"type": "content_block_stop", **place}
        yield {"type": "message_delta", **self.end()}
        yield {"type": "message_stop"}

    def whole(self) -> JsonObject:
        whole, end = (None, *self.answer.reader.whole_calls), self.end()
        content = [block_of(block) for block in self.answer.blocks if block.call in whole]
        return {**self.head, "content": content, **end["delta"], "usage": end["usage"]}

    def end(self) -> dict[str, JsonObject]:
        """Why the answer ended, and its tokens; of the prompt, those that were read for it stand apart from those that were not
        read again."""
        request, stop, tokens = self.answer.request, self.answer.reader.stop, usage(self.answers)
        reason = REASONS[self.answer.reason] if stop is None else "stop_sequence"
        counts = {
            "input_tokens": len(request.prompt.ids) - request.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": request.cached_tokens, "output_tokens": tokens["completion_tokens"],
            "locret": tokens["locret"],
        }  # fmt: skip
        return {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": counts}


DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of the deltas of each kind of block, and their field."""
SIGNATURE = "none"
"""Placeholder of a signature, which clients want to see: thoughts are taken back without a check."""


def block_of(block: Block) -> JsonObject:
    """A block of an answer's content, as far as it is."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE if block.text else ""}
    if block.call is None:
        return {"type": "text", "text": block.text}
    values = block.call.values if block.text else {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": values}
