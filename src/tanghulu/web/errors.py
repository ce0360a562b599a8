"""Typed errors as HTTP answers, in OpenAI's shape: {"error": {"message", "type", "code", "param"}}.

Answers on the paths of Anthropic's Messages API have its shape instead, whatever part of the process refuses the
request: {"type": "error", "error": {"type", "message", "details": {"error_code"}}, "request_id"}.

The only place with the HTTP statuses of errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tanghulu.errors import InvalidRequest, TanghuluError

_log = structlog.get_logger(__name__)

REQUEST_TIMEOUT = 408
_STATUS = {
    "INVALID_REQUEST": 400,
    "CONTEXT_LENGTH_EXCEEDED": 400,
    "UNAUTHORIZED": 401,
    "FORBIDDEN": 403,
    "CHUNK_NOT_FOUND": 404,
    "MODEL_NOT_FOUND": 404,
    "NODE_NOT_FOUND": 404,
    "REQUEST_NOT_FOUND": 404,
    "RESPONSE_NOT_FOUND": 404,
    "BODY_TOO_SLOW": REQUEST_TIMEOUT,
    "CONFLICT": 409,
    "TOO_MANY_CONNECTIONS": 503,
    "LENGTH_REQUIRED": 411,
    "PRECONDITION_FAILED": 412,
    "BODY_TOO_LARGE": 413,
    "WRONG_CONTENT_TYPE": 415,
    "RANGE_NOT_SATISFIABLE": 416,
    "HEADER_TOO_LARGE": 431,
    "REQUEST_KILLS_WORKERS": 422,
    "OVERLOADED": 429,
    "RATE_LIMIT_EXCEEDED": 429,
    "NODE_UNAVAILABLE": 503,
    "VERSION_MISMATCH": 503,
    "MASTER_UNAVAILABLE": 503,
    "NOT_LEADER": 503,
    "MOVED": 503,
    "DIRECTORY_INCOMPLETE": 503,
    "BODIES_FULL": 503,
    "STORE_FULL": 503,
    "QUOTA_EXCEEDED": 503,
    "LEASE_EXPIRED": 503,
    "TRANSFER_FAILED": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {
    429: "rate_limit_error",
    401: "authentication_error",
    403: "permission_error",
    503: "service_unavailable_error",
}
#: Root of the paths whose errors have Anthropic's shape, the types there by status, and its status of a full queue.
ANTHROPIC: Final = "/v1/messages"
_ANTHROPIC_TYPES = _TYPES | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
_ANTHROPIC_TYPES |= {529: "overloaded_error", REQUEST_TIMEOUT: "timeout_error", 504: "timeout_error"}
_QUEUE_FULL = 529
#: Errors after which a client may retry later.
_COME_BACK = (429, 503)
#: Rejections that reflect the load, and not only one request.
_NOTED = (REQUEST_TIMEOUT, 413, 429)
_CHALLENGE = {401: "Bearer"}
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
#: Parts of a fault's path that name one of several kinds that a value may have, and no field.
_KIND = re.compile(r"[\[(-]|^(str|int|float|bool|[A-Z]\w*)$")
_MOST_NAME_CHARACTERS = 64
#: The rest of a stalled body would be taken for the next request.
_CONNECTION = {REQUEST_TIMEOUT: "close"}


class BadField(InvalidRequest):
    """One field of the body is wrong; ``param`` names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ResponseNotFound(InvalidRequest):
    """The referenced response is not stored here."""

    code = "RESPONSE_NOT_FOUND"


class RequestNotFound(InvalidRequest):
    """The referenced request is unknown here."""

    code = "REQUEST_NOT_FOUND"


class BodyTooLarge(TanghuluError):
    """The body exceeds the maximum length."""

    code = "BODY_TOO_LARGE"


class HeaderTooLarge(TanghuluError):
    """The header of a request, or the trailer of its body, exceeds the maximum length."""

    code = "HEADER_TOO_LARGE"


class WrongContentType(TanghuluError):
    """The body has an unsupported content type."""

    code = "WRONG_CONTENT_TYPE"


class BodyTooSlow(TanghuluError):
    """The body stopped arriving."""

    code = "BODY_TOO_SLOW"


class BodiesFull(TanghuluError):
    """The bodies being received leave no room for this one."""

    code = "BODIES_FULL"
    retryable = True


class TooManyConnections(TanghuluError):
    """The process has reached its maximum number of connections."""

    code = "TOO_MANY_CONNECTIONS"
    retryable = True


class PreconditionFailed(InvalidRequest):
    """If-Match or If-None-Match of a request does not hold."""

    code = "PRECONDITION_FAILED"


class LengthRequired(InvalidRequest):
    """A body comes without its length."""

    code = "LENGTH_REQUIRED"


def from_validation(error: ValidationError) -> BadField:
    """Return the first fault of a body, in one sentence.

    A value that may be of several kinds has a fault for each of them. The intended kind is the one with which the value
    was read furthest: deepest, to the latest item, and to a value of the right type.
    """
    faults = error.errors(include_url=False, include_input=False)
    first_of_kind: dict[tuple[int | str, ...], ErrorDetails] = {}
    for fault in faults:
        if fault["loc"][:1] == faults[0]["loc"][:1]:
            first_of_kind.setdefault(tuple(part for part in fault["loc"] if _KIND.search(str(part))), fault)
    furthest = max(first_of_kind.values(), key=_reach)
    return _bad_field(furthest["type"], furthest["msg"], tuple(furthest["loc"]))


def _reach(fault: ErrorDetails) -> tuple[int, list[int], bool]:
    place = fault["loc"]
    return len(place), [part for part in place if isinstance(part, int)], not fault["type"].endswith("_type")


def _from_request(error: RequestValidationError) -> BadField:
    """Return the first fault of a parameter or body checked by FastAPI, with its place in the request."""
    first = error.errors()[0]
    return _bad_field(first["type"], first["msg"], tuple(first["loc"][1:]))


def _bad_field(kind: str, message: str, where_in: tuple[int | str, ...]) -> BadField:
    names = [str(part)[:_MOST_NAME_CHARACTERS] for part in where_in]  # includes a client's own
    path = ".".join(name for name in names if not _KIND.search(name))
    message = message.removeprefix("Value error, ")
    if kind == "json_invalid":
        return BadField(f"the body is not JSON: {message}")
    if kind in ("model_attributes_type", "missing") and not names:
        return BadField("the body must be a JSON object, sent with content-type: application/json")
    return BadField(f"{path}: {message}" if path else message, names[0] if names else None)


def status_of(error: TanghuluError) -> int:
    """Return the HTTP status of a typed error."""
    return _STATUS.get(error.code, 500)


def body_of(error: TanghuluError) -> dict[str, Any]:
    """Return the JSON body of a typed error."""
    return _body(status_of(error), error.message, error.code.lower(), getattr(error, "param", None))


def _body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's Messages API, whose errors and headers differ."""
    return bool(scope["path"] == ANTHROPIC or scope["path"].startswith(f"{ANTHROPIC}/"))


def anthropic_body(error: TanghuluError, scope: Scope) -> dict[str, Any]:
    """Return the JSON body of a typed error in Anthropic's shape."""
    return _in_anthropic_shape(status_of(error), body_of(error)["error"], scope)[1]


def _in_anthropic_shape(status: int, shown: Mapping[str, Any], scope: Scope) -> tuple[int, dict[str, Any]]:
    """Return status and body for an error ``shown`` in OpenAI's shape."""
    if shown["code"] == "overloaded":
        status = _QUEUE_FULL
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": shown["message"], "details": {"error_code": shown["code"]}}
    return status, {"type": "error", "error": error, "request_id": scope.get("state", {}).get("x_request_id")}


class _ErrorAnswer(JSONResponse):
    """An error in OpenAI's shape; sent in Anthropic's on its paths."""

    def __init__(self, body: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> None:
        self._shown = body["error"]
        super().__init__(body, status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope):
            self.status_code, body = _in_anthropic_shape(self.status_code, self._shown, scope)
            self.body = self.render(body)
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _answer(
    status: int, body: dict[str, Any], retry_after_s: int = 1, headers: Mapping[str, str] = MappingProxyType({})
) -> JSONResponse:
    fields = {"www-authenticate": _CHALLENGE.get(status), "connection": _CONNECTION.get(status), **headers}
    if status in _COME_BACK:
        fields["retry-after"] = str(retry_after_s)
    return _ErrorAnswer(body, status, {name: value for name, value in fields.items() if value})


def answer_to(error: TanghuluError, retry_after_s: int = 1) -> JSONResponse:
    """Return the complete answer to a typed error; ``retry_after_s`` is sent with retryable ones."""
    return _answer(status_of(error), body_of(error), retry_after_s)


def log_failure(error: TanghuluError, scope: Scope) -> None:
    """Log a failed request; if only its own client can fix it, at the level debug.

    Its ids are those in the state of ``scope``: ``request_id``, the call's, and ``x_request_id``, the client's.
    """
    status = status_of(error)
    log = _log.warning if status >= 500 else _log.info if status in _NOTED else _log.debug
    state = scope.get("state", {})
    ids = {"request": state.get("request_id"), "x_request_id": state.get("x_request_id")}
    log("request.failed", **ids, path=scope["path"], status=status, code=error.code, reason=error.message)


def _once_a_second() -> int:
    return 1


def _not_found(method: str, path: str) -> str:
    return f"{method} {path}: Not Found"


def _methods_of(app: FastAPI, scope: Scope) -> set[str]:
    """Return the methods that the routes of ``app`` serve at the path of ``scope``; HEAD wherever GET is served."""
    found = {method for method in _METHODS if _serves(app, {**scope, "method": method})}
    return found | {"HEAD"} if "GET" in found else found


def _serves(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


class _HeadAsGet:
    """Middleware that serves HEAD by the route for GET unless it has its own; the server drops the body."""

    def __init__(self, app: ASGIApp, served: FastAPI) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD" or _serves(self._served, scope):
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}  # the server must still see HEAD
        try:
            await self._app(as_get, receive, send)
        finally:
            scope.update({name: as_get[name] for name in ("route", "endpoint") if name in as_get})


def install(
    app: FastAPI,
    process: str,
    retry_after_s: Callable[[], int] = _once_a_second,
    not_found: Callable[[str, str], str] = _not_found,
) -> None:
    """Answer every error of ``app`` in one shape, and log it; serve HEAD if GET is served.

    ``process`` names the process whose log has a bug's trace; ``retry_after_s`` returns when rejected callers should
    retry; ``not_found`` returns, for a method and a path, what exists instead.
    """

    async def typed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TanghuluError)
        log_failure(error, request.scope)
        return answer_to(error, retry_after_s())

    async def bad(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer_to(_from_request(error))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        codes = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed"}
        what = f"{request.method} {request.url.path}: {error.detail}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 404:
            what = not_found(request.method, request.url.path)
        if error.status_code == 405:
            headers["allow"] = ", ".join(sorted(_methods_of(app, request.scope)))
        body = _body(error.status_code, what, codes.get(error.status_code, "http_error"))
        return _answer(error.status_code, body, headers=headers)

    async def gone(_: Request, error: Exception) -> JSONResponse:
        return _answer(499, _body(499, "the client disconnected while it sent its body", "client_closed_request"))

    async def bug(request: Request, error: Exception) -> JSONResponse:
        _log.error("http.bug", path=request.url.path, exc_info=error)
        return _answer(500, _body(500, f"internal error of {process}; see the traceback in its log", "internal"))

    app.add_middleware(_HeadAsGet, served=app)
    app.add_exception_handler(TanghuluError, typed)
    app.add_exception_handler(RequestValidationError, bad)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)
