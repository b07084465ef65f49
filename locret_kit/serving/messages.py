"""Bodies and errors as the protocols shape them: messages, tools and response formats in requests, where a null field is absent;
and errors in the shape of OpenAI's protocol, or of Anthropic's on its routes."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, Field, WrapValidator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..answers.values import nested
from ..naming import first_line, prefixed_errors, valid_unicode
from ..text.tokens import HALVES
from ..validation import BOUNDS
from .request import Busy, Stopping

JsonObject = dict[str, object]
"""An object of a body, as JSON has it."""
ROLES = {"developer": "system", "function": "tool"}
"""Names of roles in chat templates."""
TEXTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text."""
BILLING = re.compile(r"\Ax-anthropic-billing-header:(?: *[\w-]+=[^;\s]*;?)+\s*")
"""Line before Claude Code's system prompt, with another hash in every request: no prompt would begin as the last one."""


def form(words: str) -> WrapValidator:
    """Words for all that a field may be, in place of pydantic's for one of several types."""

    def checked(value: object, check: Callable[[object], object]) -> object:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(checked)


def places(*names: str) -> FieldInfo:
    """Names of a field, by this protocol and by other servers; of several the first counts."""
    return Field(validation_alias=AliasChoices(*(AliasPath(*name.split(".")) for name in names)))


def without_nulls(value: object) -> object:
    """An object without its fields that are null, which are as good as absent."""
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value


class Part(BaseModel):
    """A part of a body. A field that is null is absent."""

    _absent = model_validator(mode="before")(without_nulls)


def text_of(content: object) -> str:
    """The text of a message's content: a text, or parts of one. Raises ValueError for parts of another type."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content must be a text or a list of parts")
    texts = []
    for part in content:
        kind = "text" if isinstance(part, str) else nested(part, "type")
        if kind not in TEXTS:
            given = str(kind or type(part).__name__)[:40]
            raise ValueError(f"parts must be text (of type {', '.join(TEXTS)}), not {given!r}")
        text = part if isinstance(part, str) else nested(part, "refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"a part of type {kind!r} needs a text")
        texts.append(text)
    return "".join(texts)


def system_of(body: JsonObject, field: str) -> list[Message]:
    """The system message in a field of a body, if there is one. Raises ValueError, with the field's name."""
    with prefixed_errors(field, ValueError):
        text = text_of(body.get(field) or "")
    made = placed(field, {"role": "system", "content": text})
    return [made] if made.content else []


def call_of(call: object) -> JsonObject:
    """A call of a tool as chat templates have it: with its arguments as an object, where they are JSON that a prompt can hold.

    Raises:
        ValueError: it names no function.
    """
    if nested(call, "type") == "custom":  # a tool whose only argument is a text
        call = tool_call(nested(call, "id"), nested(call, "custom", "name"), {"input": nested(call, "custom", "input")})
    name, arguments = nested(call, "function", "name"), nested(call, "function", "arguments") or "{}"
    if not isinstance(name, str):
        raise ValueError("a tool call needs a function with a name")
    with suppress(ValueError, RecursionError):
        made = json.loads(arguments) if isinstance(arguments, str) else arguments
        halves = HALVES.search(json.dumps(made, ensure_ascii=False))
        arguments = json.dumps(made) if halves else made
    return {"type": "function", "id": str(nested(call, "id") or ""), "function": {"name": name, "arguments": arguments}}


class Message(Part):
    """A message of a conversation. An answer may have calls of tools in the place of a content."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"], BeforeValidator(lambda one: ROLES.get(str(one), one))
    ]
    content: Annotated[str, BeforeValidator(text_of)] = ""
    tool_calls: list[Annotated[JsonObject, BeforeValidator(call_of)]] = Field(default_factory=list)
    """Calls in the form of chat templates."""
    reasoning_content: Annotated[str | None, places("reasoning_content", "reasoning")] = None
    """An earlier answer's thought."""
    tool_call_id: str | None = None
    name: str | None = None
    _place: str = ""
    """Its place in the client's body, such as ``messages.3``."""

    @model_validator(mode="before")
    @classmethod
    def _speaks(cls, message: object) -> object:
        role, content = nested(message, "role"), nested(message, "content")
        if content is None and role in ("system", "developer", "user"):
            raise ValueError(f"a message of role {role!r} needs a content")
        if isinstance(message, dict) and (call := message.get("function_call")) and not message.get("tool_calls"):
            return {**message, "tool_calls": [{"function": call}]}  # from before there were several calls
        return message

    @model_validator(mode="after")
    def _stable(self) -> Message:
        self.content = BILLING.sub("", self.content) if self.role == "system" else self.content
        return self

    def rendered(self) -> JsonObject:
        """Message in the form of chat templates, and its ``place`` in the body."""
        said = {name: value for name, value in self.model_dump(exclude_none=True).items() if value != []}
        return {**said, "place": self._place}


def placed(place: str, value: object) -> Message:
    """The message that a value at this place of a body is. Raises Refused, with the field's name."""
    try:
        made = Message.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (place, *first["loc"])))
        raise Refused(400, f"{where}: {str(first['msg']).removeprefix('Value error, ')}", where) from None
    made._place = place
    return made


ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"
"""Beginnings of the paths of protocols that are not chat completions'."""
SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "seed", "document_id", "budget", "policy", "chat_template_kwargs", "continue_final_message", "tools",
    "reasoning_effort", "reasoning", "include_reasoning", "thinking", "enable_thinking", "think", "thinking_budget",
    "thinking_token_budget", "tool_choice",
)  # fmt: skip
FIELDS = {
    ANTHROPIC: (*SAME, "messages", "max_tokens", "thread", "stop_sequences", "output_config", "output_format"),
    RESPONSES: (*SAME, "stop", "parallel_tool_calls", "store", "max_output_tokens", "text"),
}
"""Fields of other protocols that a chat completion has by the same name, or by another of its ``places``."""
NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Names of fields in ``/v1/responses``."""


def refuse(body: object, fields: Mapping[str, str]) -> None:
    """Raise ValueError for a body with one of the fields that change an answer and are not here, and why."""
    for name, why in fields.items():
        if nested(body, name) not in (None, False, 0, [], {}, "", "none", ["text"]):
            raise ValueError(f"{name} is not supported{why}")


def fields_of(path: str, body: JsonObject) -> JsonObject:
    """Fields of a chat completion that the body of another protocol has."""
    return {name: body[name] for name in FIELDS[path] if body.get(name) is not None}


def field_of(path: str, *parts: object) -> str | None:
    """The name of a field as the client knows it; None for the whole body. Messages of another protocol are not numbered as its
    own are."""
    if parts and path.startswith((*FIELDS,)):
        first, *rest = map(str, parts)
        parts = NAMES.get(first, first) if path.startswith(RESPONSES) else first, *(rest if first != "messages" else ())
    return ".".join(map(str, parts)) or None


def tool_call(id: object, name: object, arguments: object) -> JsonObject:
    """A call of a tool, as chat completions have it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Function(Part):
    """A function that an answer may call."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    parameters: Annotated[JsonObject, places("parameters", "input_schema")] = Field(default_factory=dict)


class Tool(Part):
    """A tool. In other protocols its function's fields stand beside its type. Of a tool of another type, such as ``web_search``,
    the name alone is kept: it is left out."""

    type: str = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _own(cls, tool: object) -> object:
        kind = nested(tool, "type")
        if kind == "custom" and nested(tool, "input_schema") is not None:  # Anthropic's word
            return {"function": tool}
        if isinstance(kind, str) and kind != "function":
            return {"type": kind, "function": {"name": (tool_name(tool) or kind)[:200]}}
        return {**tool, "function": tool} if isinstance(tool, dict) and "name" in tool else tool


def tool_name(tool: object) -> str:
    """The name of a tool that is declared or chosen, in the form of chat completions or of responses; '' for none."""
    name = nested(tool, str(nested(tool, "type") or "function"), "name") or nested(tool, "name")
    return name if isinstance(name, str) else ""


class ResponseFormat(Part):
    """The form of an answer. In other protocols, and beside ``json_object``, the schema stands by itself."""

    type: Literal["text", "json_object", "json_schema"]
    schema_of_answer: Annotated[JsonObject | None, places("json_schema.schema", "schema")] = None
    """The schema of the answer; None for any text."""

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and self.schema_of_answer is None:
            raise ValueError("json_schema needs a schema, which is an object")
        if self.type != "json_schema":
            self.schema_of_answer = None if self.type == "text" else self.schema_of_answer or {"type": "object"}
        return self


Body = TypeVar("Body", bound=BaseModel)
TOO_LONG = "context_length_exceeded"
"""Code of a prompt that is too long."""
KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "service_unavailable_error",
}  # fmt: skip
ANTHROPIC_KINDS = KINDS | {413: "request_too_large", 503: "overloaded_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""OpenAI's error codes. Clients tell errors apart by them."""


class Refused(HTTPException):
    """A request that is refused.

    Args:
        param: the wrong field. code: tells clients the kind of error.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, message, headers)
        self.param, self.code = param, code


class Failed(Exception):
    """A request that the engine could not finish."""


STATUSES: dict[type[Exception], int] = {Busy: 429, Stopping: 503, Failed: 500, ValueError: 400}
"""HTTP statuses of errors that the engine and the bodies raise. Their messages are for the client."""


def refusal_of(error: Exception, path: str) -> Refused:
    """An error in words for the client. Of our own faults the log alone says more."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors()[0], path)
    if not isinstance(error, StarletteHTTPException):
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
        headers = {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else None
        return Refused(status or 500, first_line(error) if status else "the server failed", headers=headers)
    said, cause = str(error.detail), error.__cause__
    if isinstance(cause, OSError):  # of an upload, whose words may name folders of this machine
        return Refused(507, f"the upload cannot be put on disk: {os.strerror(cause.errno or errno.EIO)}")
    if isinstance(cause, ValueError | RecursionError) and not path.startswith("/v1/documents"):  # uploads are forms
        said = f"the body is not JSON: {first_line(cause)}"
    elif said == "Not Found":  # Starlette's own words
        hint = "" if path.startswith("/v1/") else ": OpenAI's paths begin with /v1"
        said = f"there is no {path[:64]} here{hint}"
    return Refused(error.status_code, said, headers=error.headers)


def invalid(first: Mapping[str, Any], path: str) -> Refused:
    """The refusal of a body by the first of its errors, as pydantic has it."""
    if first["type"] == "json_invalid":  # its place is a character, no field
        return Refused(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}")
    where = field_of(path, *first["loc"][1:])
    bounds = [f"{words} {first['ctx'][name]}" for name, words in BOUNDS.items() if name in first.get("ctx", ())]
    if where and bounds:
        return Refused(400, f"{where}={str(first['input'])[:40]} must be {bounds[0]}", where)
    said = str(first["msg"]).removeprefix("Value error, ")
    if where is None and first["type"] in ("missing", "model_attributes_type", "model_type", "dict_type"):
        said = "the body must be a JSON object, with content-type: application/json"
    return Refused(400, f"{where}: {said}" if where else said, where)


def error_of(told: Refused, path: str) -> dict[str, object]:
    """The body of an error, in the shape of the protocol that ``path`` is of."""
    status, message, code = told.status_code, valid_unicode(told.detail), told.code
    if path.startswith(ANTHROPIC):
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        said = f"prompt is too long: {message}" if code == TOO_LONG else message  # words by which its clients know it
        details = {"details": {"error_code": code}} if code not in (None, TOO_LONG) else {}
        return {"type": "error", "error": {"type": kind, "message": said, **details}}
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = told.param and field_of(path, told.param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}


def problem(error: Exception, path: str) -> JSONResponse:
    """Response to an error that a route raises."""
    told = refusal_of(error, path)
    return JSONResponse(error_of(told, path), told.status_code, told.headers)


def checked(kind: type[Body], value: object) -> Body:
    """A body of this kind. Raises RequestValidationError, as FastAPI does for a route's own body."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error


def add_errors(app: FastAPI) -> None:
    """Answer whatever a route raises."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return problem(error, request.url.path)

    for kind in (RequestValidationError, StarletteHTTPException, Exception, *STATUSES):
        app.add_exception_handler(kind, answer)
