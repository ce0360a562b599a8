"""Typed errors as HTTP answers, in OpenAI's shape: {"error": {"message", "type", "code", "param"}}.

The only place of the conductor that knows HTTP statuses of errors.
"""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tanghulu.errors import InvalidRequest, TanghuluError

_log = structlog.get_logger(__name__)

_STATUS = {
    "INVALID_REQUEST": 400,
    "CONTEXT_LENGTH_EXCEEDED": 400,
    "BODY_TOO_LARGE": 413,
    "UNAUTHORIZED": 401,
    "FORBIDDEN": 403,
    "MODEL_NOT_FOUND": 404,
    "OVERLOADED": 429,
    "NODE_UNAVAILABLE": 503,
    "VERSION_MISMATCH": 503,
    "MASTER_UNAVAILABLE": 503,
    "NOT_LEADER": 503,
    "DIRECTORY_INCOMPLETE": 503,
    "STORE_FULL": 503,
    "QUOTA_EXCEEDED": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {
    429: "rate_limit_error",
    401: "authentication_error",
    403: "permission_error",
    503: "service_unavailable_error",
}
_RETRY_AFTER = {429: "1", 503: "1"}


class BadField(InvalidRequest):
    """One field of the body is wrong; ``param`` names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BodyTooLarge(TanghuluError):
    """The body is longer than the conductor reads."""

    code = "BODY_TOO_LARGE"


def from_validation(error: ValidationError) -> BadField:
    """The first thing that is wrong with a body, in one sentence."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return BadField(f"the body is not JSON: {first['msg']}")
    where = first["loc"][0] if first["loc"] else None
    return BadField(f"{path}: {first['msg']}" if path else first["msg"], str(where) if where is not None else None)


def status_of(error: TanghuluError) -> int:
    """The HTTP status of a typed error."""
    return _STATUS.get(error.code, 500)


def body_of(error: TanghuluError) -> dict[str, Any]:
    """The JSON body of a typed error."""
    return _body(status_of(error), error.message, error.code.lower(), getattr(error, "param", None))


def _body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def _answer(status: int, body: dict[str, Any]) -> JSONResponse:
    retry = _RETRY_AFTER.get(status)
    return JSONResponse(body, status, headers={"retry-after": retry} if retry else None)


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` in one shape."""

    async def typed(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TanghuluError)
        return _answer(status_of(error), body_of(error))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        what = f"{request.method} {request.url.path}: {error.detail}"
        return _answer(error.status_code, _body(error.status_code, what, codes.get(error.status_code, "http_error")))

    async def gone(_: Request, error: Exception) -> JSONResponse:
        return _answer(499, _body(499, "the client hung up while it sent its body", "client_closed_request"))

    async def bug(request: Request, error: Exception) -> JSONResponse:
        _log.error("http.bug", path=request.url.path, exc_info=error)
        return _answer(500, _body(500, "internal error of the conductor; its log has the trace", "internal"))

    app.add_exception_handler(TanghuluError, typed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)
