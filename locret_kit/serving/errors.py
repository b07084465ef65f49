"""Errors in the shape of OpenAI's protocol, and of Anthropic's on its routes."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..naming import first_line
from ..settings import BOUNDS
from .messages import ANTHROPIC, field_of
from .request import Busy, Stopping

Body = TypeVar("Body", bound=BaseModel)
TOO_LONG = "context_length_exceeded"
"""Code of a prompt that is too long."""
KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "service_unavailable_error",
}  # fmt: skip
ANTHROPIC_KINDS = KINDS | {413: "request_too_large", 503: "overloaded_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""Codes of OpenAI by which clients tell errors apart."""


class Refused(HTTPException):
    """A request that is refused.

    Args:
        param: the field that is wrong. code: by which clients tell the error from others.
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
"""Statuses of what the engine and the bodies raise; their words are for the client."""


def refusal_of(error: Exception, path: str) -> Refused:
    """An error in words for the client. Of our own faults the log alone says more."""
    if isinstance(error, Refused):
        return Refused(
            error.status_code, error.detail, error.param and field_of(path, error.param), error.code, error.headers
        )
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
    status, message, code = told.status_code, told.detail, told.code
    if path.startswith(ANTHROPIC):
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        said = f"prompt is too long: {message}" if code == TOO_LONG else message  # words by which its clients know it
        details = {"details": {"error_code": code}} if code not in (None, TOO_LONG) else {}
        return {"type": "error", "error": {"type": kind, "message": said, **details}}
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": told.param, "code": code or CODES.get(status)}}


def problem(error: Exception, path: str) -> JSONResponse:
    """The answer to what a route raises."""
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
