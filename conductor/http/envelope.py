"""The envelope of every HTTP answer: the request's id, notices for the client, and the metrics.

An ASGI application around the routes. A request's id is the client's ``X-Request-Id``, or one made here; it is returned
in the answer and logged, and so is its place in a trace (``traceparent`` in, ``traceresponse`` out). Routes add
information through the request's state: ``model`` and ``request_id`` (of the call), ``warning`` (for the client),
``ended`` (the status of an answer that failed after it had begun), ``headers`` (additional ones for the answer) and
``api_key`` (the owner of the request).
"""

from __future__ import annotations

import time
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tanghulu.auth.key_limits import RATE_HEADERS
from tanghulu.conductor.stories.origin import Trace, trace_of
from tanghulu.web.server import id_headers, request_id_of

_log = structlog.get_logger(__name__)

#: Status of an answer that was never started, because the client had left.
CLIENT_CLOSED_REQUEST: Final = 499
_HEADER: Final = b"x-request-id"
_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METHODS: Final = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"))


class Envelope:
    """``app`` inside its envelope; ``cors_origins`` are the web origins allowed to read the answers."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, cors_origins: tuple[str, ...] = ()) -> None:
        names = ("route", "method", "status", "model")
        self._requests = Counter(
            "tanghulu_conductor_http_requests", "HTTP requests that were answered", names, registry=registry
        )
        self._seconds = Histogram(
            "tanghulu_conductor_http_request_seconds",
            "From an HTTP request's header to the end of its answer",
            names,
            buckets=_SECONDS,
            registry=registry,
        )
        self._app = app
        if cors_origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "traceresponse", "warning", "retry-after", *RATE_HEADERS],
                max_age=3600,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        request_id = state["x_request_id"] = _id_of(scope)
        trace = state["trace"] = _trace_of(scope)
        began_s, status = time.monotonic(), CLIENT_CLOSED_REQUEST
        state["began_s"] = began_s

        async def send_framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), *id_headers(scope, request_id)]
                headers.append((b"traceresponse", trace.header.encode()))
                if "warning" in state:
                    headers.append((b"warning", state["warning"].encode()))
                headers += state.get("headers", ())
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_framed)
        finally:
            self._count(scope, state.get("ended", status), time.monotonic() - began_s)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        route = getattr(scope.get("route"), "path", "") if status not in (404, 405) else ""
        method = scope["method"] if scope["method"] in _METHODS else ""
        model = state.get("model", "")
        labels = (route, method, str(status), model)
        self._requests.labels(*labels).inc()
        self._seconds.labels(*labels).observe(seconds)
        _log.debug(
            "http.answered",
            request=state.get("request_id"),
            x_request_id=state["x_request_id"],
            traceparent=state["trace"].header,
            key=state["api_key"].name if "api_key" in state else None,
            method=method,
            path=scope["path"],
            status=status,
            model=model,
            seconds=seconds,
        )


def _trace_of(scope: Scope) -> Trace:
    return trace_of([value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"traceparent"])


def _id_of(scope: Scope) -> str:
    return request_id_of([value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER])
