"""Errors in OpenAI's shape."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..naming import first_line
from .request import Busy, Stopping

KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "service_unavailable_error",
}  # fmt: skip


CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""Codes of OpenAI by which clients tell errors apart."""


def problem(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    """An error in OpenAI's shape."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}
    return JSONResponse(body, status, headers)


class Failed(Exception):
    """A request that the engine could not finish."""


def add_errors(app: FastAPI) -> None:
    """Answer whatever a route raises."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":  # its place is a character, no field
            return problem(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}")
        where = ".".join(str(part) for part in first["loc"][1:]) or None
        said = str(first["msg"]).removeprefix("Value error, ")
        return problem(400, f"{where}: {said}" if where else said, where)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return problem(500, "the server failed")  # how is in its log alone

    @app.exception_handler(404)
    async def missing(request: Request, error: Exception) -> JSONResponse:
        return problem(404, str(getattr(error, "detail", f"{request.url.path} is not there")))

    @app.exception_handler(ValueError)
    async def wrong(request: Request, error: ValueError) -> JSONResponse:
        return problem(400, first_line(error))

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> JSONResponse:
        return problem(429, str(error), headers={"retry-after": str(error.retry_after)})

    @app.exception_handler(Stopping)
    async def stopping(request: Request, error: Stopping) -> JSONResponse:
        return problem(503, str(error))

    @app.exception_handler(Failed)
    async def failed(request: Request, error: Failed) -> JSONResponse:
        return problem(500, str(error))
