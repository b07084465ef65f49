"""Messages, tools and forms of answers in bodies of requests. A field that is null is absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Literal, TypedDict, cast

from pydantic import BaseModel, Field, ValidationError, WrapValidator, field_validator, model_validator

JsonObject = dict[str, object]
"""An object of a body, as JSON has it."""
ROLES = {"developer": "system", "function": "tool"}
"""Names of roles in chat templates."""
TEXTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text."""


def form(words: str) -> WrapValidator:
    """Words for all that a field may be, in place of pydantic's for one of several types."""

    def checked(value: object, check: Callable[[object], object]) -> object:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(checked)


def without_nulls(value: object) -> object:
    """An object without its fields that are null, which are as good as absent."""
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value


class Part(BaseModel):
    """A part of a body. A field that is null is absent."""

    _absent = model_validator(mode="before")(without_nulls)


def nested(value: object, *names: str) -> object:
    """The value within objects, by its names from the outside in; None where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text_of(content: object) -> str:
    """The text of a message's content: a text, or parts of one. Raises ValueError for parts of another type."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content must be a text or a list of parts")
    texts = []
    for part in content:
        kind = nested(part, "type")
        if kind not in TEXTS:
            given = str(kind or type(part).__name__)[:40]
            raise ValueError(f"parts must be text (of type {', '.join(TEXTS)}), not {given!r}")
        text = nested(part, "refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"a part of type {kind!r} needs a text")
        texts.append(text)
    return "".join(texts)


class TemplateMessage(TypedDict, total=False):
    """A message as chat templates have it: a role, a content, and what else there is."""

    role: str
    content: str
    tool_calls: list[JsonObject]
    tool_call_id: str
    name: str


class Message(Part):
    """A message of a conversation. An answer may have calls of tools in the place of a content."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str = ""
    tool_calls: list[JsonObject] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _speaks(cls, message: object) -> object:
        if nested(message, "content") is None and (role := nested(message, "role")) not in ("assistant", None):
            raise ValueError(f"a message of role {str(role)[:40]!r} needs a content")
        return message

    _text = field_validator("content", mode="before")(text_of)

    def rendered(self) -> TemplateMessage:
        """As chat templates have it."""
        said = self.model_dump(exclude_none=True) | {"role": ROLES.get(self.role, self.role)}
        said["tool_calls"] = [call_of(call) for call in self.tool_calls]
        return cast(TemplateMessage, {name: value for name, value in said.items() if value != []})


ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"
"""Beginnings of the paths of protocols that are not chat completions'."""
SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "seed", "document_id", "budget", "policy", "chat_template_kwargs",
)  # fmt: skip
NAMES: dict[str, dict[str, str]] = {
    ANTHROPIC: {
        **{name: name for name in (*SAME, "messages", "max_tokens", "thread", "thinking")}, "stop": "stop_sequences",
        "response_format": "output_config.format",
    },
    RESPONSES: {
        **{name: name for name in (*SAME, "min_p", "tool_choice", "parallel_tool_calls", "store")},
        "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    },
}  # fmt: skip
"""Fields of a chat completion, and what a client of another protocol calls them; of others it says nothing."""


def fields_of(path: str, body: JsonObject) -> JsonObject:
    """Fields of a chat completion that the body of another protocol has."""
    values = {name: nested(body, *own.split(".")) for name, own in NAMES[path].items()}
    return {name: value for name, value in values.items() if value is not None}


def field_of(path: str, *parts: object) -> str | None:
    """The name of a field as the client knows it; None for the whole body. Messages of another protocol are not numbered as its
    own are."""
    names = next((names for start, names in NAMES.items() if path.startswith(start)), None)
    if names is not None and parts:
        first = str(parts[0])
        parts = names.get(first, first), *(() if first == "messages" else parts[1:])
    return ".".join(map(str, parts)) or None


def tool_call(id: object, name: object, arguments: object) -> JsonObject:
    """A call of a tool, as chat completions have it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_of(call: JsonObject) -> JsonObject:
    """A call of a tool as chat templates have it: with its arguments as an object.

    Raises:
        ValueError: it names no function.
    """
    name, arguments = nested(call, "function", "name"), nested(call, "function", "arguments") or "{}"
    if not isinstance(name, str):
        raise ValueError("a tool call needs a function with a name")
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", "id": str(call.get("id", "")), "function": {"name": name, "arguments": arguments}}


class Function(Part):
    """A function that an answer may call."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    parameters: JsonObject = Field(default_factory=dict)


class Tool(BaseModel):
    """A tool."""

    type: Literal["function"]
    function: Function


class ResponseFormat(Part):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonObject | None = None
    bare: JsonObject | None = Field(default=None, alias="schema")
    """A schema beside ``json_object``, as llama.cpp's clients send it."""

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict):
            raise ValueError("json_schema needs a schema, which is an object")
        return self

    @property
    def schema_of_answer(self) -> JsonObject | None:
        """The schema of the answer; None for any text."""
        if self.type == "text":
            return None
        schema = (self.json_schema or {}).get("schema", self.bare or {"type": "object"})
        return schema if isinstance(schema, dict) else {"type": "object"}
