"""Routes as declared by applications: checked targets, directly called routes, /metrics.

Starlette decodes targets leniently: bytes that are not UTF-8 become U+FFFD, and so another name, and an unknown option
is ignored. The functions here reject both.

An endpoint that takes a request and returns a response leaves an application's layers nothing to do: no parameter to
check, nothing to convert. The layers take a tenth of the time of a streamed answer, so ``DirectRoutes`` bypasses them
for such endpoints. The routes are declared with the application's others, so they are documented, and its handlers
answer the errors that an endpoint raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tanghulu.errors import InvalidRequest


class _RestConvertor(Convertor[str]):
    """Matches the whole rest of a path; Starlette's own ``path`` stops at a line end."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """Return the text unchanged."""
        return value

    def to_string(self, value: str) -> str:
        """Return the path of a text."""
        return value


register_url_convertor("rest", _RestConvertor())


def rest(name: str) -> str:
    """Return the end of a route's path that takes the rest as the parameter ``name``."""
    return f"{{{name}:rest}}"


def check_path(request: Request) -> None:
    """Raise InvalidRequest if the path is not UTF-8: it would contain replacement characters."""
    _decoded(request.scope["raw_path"], "path")


async def checked_target(request: Request) -> None:
    """Raise InvalidRequest for a path or query that is not UTF-8, and for an unknown or repeated option.

    A dependency of FastAPI's routes.
    """
    check_path(request)
    _decoded(request.scope["query_string"], "query")
    route = request.scope.get("route")
    known = {each.alias for each in route.dependant.query_params} if isinstance(route, APIRoute) else set()
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            there = f"the known ones are {', '.join(sorted(known))}" if known else "this route has none"
            raise InvalidRequest(f"the query option {name[:80]!r} is unknown; {there}")
        if count > 1:
            raise InvalidRequest(f"the query has the option {name!r} {count} times; give it once")


def _decoded(text: bytes, what: str) -> None:
    try:
        unquote_to_bytes(text).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the {what} is not percent-encoded UTF-8: {error}") from None


class DirectRoutes:
    """``routes`` of ``app``, with fixed paths, bypassing its layers; everything else goes to the application."""

    def __init__(self, app: FastAPI, routes: Iterable[APIRoute]) -> None:
        self.app = app
        self._routes = {(method, route.path): route for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"], begun = route, False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        request = Request(scope, receive)
        try:
            answer = await route.endpoint(request)
            await answer(scope, receive, send_noted)
        except Exception as error:
            if begun or not await self._answer(error, request, send):
                raise

    async def _answer(self, error: Exception, request: Request, send: Send) -> bool:
        """Answer ``error`` by the application's handler for its kind; return False for a bug, to be re-raised."""
        handlers = self.app.exception_handlers
        kind = next(kind for kind in type(error).__mro__ if kind in handlers)
        answer = await handlers[kind](request, error)  # type: ignore[misc]
        await answer(request.scope, request.receive, send)
        return kind is not Exception


def add_metrics(app: APIRouter | FastAPI, registry: CollectorRegistry) -> None:
    """Have ``app`` serve /metrics."""

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format; the same as on --metrics-port."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
