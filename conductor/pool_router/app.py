"""The global router's HTTP routes: generation is routed by the grid, requests for any pool go to the first."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tanghulu.conductor.http.reply import read_body
from tanghulu.conductor.pool_router.demand import demand_of, parse_body
from tanghulu.conductor.pool_router.forward import Forwarder
from tanghulu.conductor.pool_router.relaying import Relay
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.errors import InvalidRequest
from tanghulu.version import __version__
from tanghulu.web import errors
from tanghulu.web.routes import add_metrics
from tanghulu.web.server import id_headers, request_id_of

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
_ABOUT = ("/v1/models", "/v1/models/{name:path}", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
_COUNTING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_ANY = (*(("GET", path) for path in _ABOUT), *(("POST", path) for path in _COUNTING))
_HEADER: Final = b"x-request-id"


class RequestIds:
    """``app`` with an X-Request-Id in each answer: the client's, or one made here and also sent to conductors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER]
        request_id = request_id_of(given)
        others = [(name, value) for name, value in scope["headers"] if name != _HEADER]
        state = {**scope.get("state", {}), "x_request_id": request_id}
        named = {**scope, "headers": [*others, (_HEADER, request_id.encode())], "state": state}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = id_headers(scope, request_id)
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() not in dict(ids)]
                message = {**message, "headers": [*headers, *ids]}
            await send(message)

        await self._app(named, receive, send_named)


def make_app(forwarder: Forwarder, registry: CollectorRegistry, max_body_bytes: int) -> FastAPI:
    """Build all routes on ``forwarder``."""
    app = FastAPI(title="tanghulu router", version=__version__, redirect_slashes=False)
    errors.install(app, "the router")

    async def generate(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return Relay(forwarder.generate(_target(request), body, dict(request.headers)))

    async def anywhere(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return Relay(forwarder.anywhere(request.method, _target(request), body, dict(request.headers)))

    async def kept(request: Request) -> Response:
        target, response_id = _target(request), request.path_params["response_id"]
        return Relay(forwarder.where_kept(response_id, request.method, target, b"", dict(request.headers)))

    for path in GENERATING:
        app.add_api_route(path, generate, methods=["POST"], response_model=None)
    for method, path in _ANY:
        app.add_api_route(path, anywhere, methods=[method], response_model=None)
    app.add_api_route("/v1/responses/{response_id}", kept, methods=["GET", "DELETE"], response_model=None)
    add_metrics(app, registry)
    _add_admin(app, forwarder, max_body_bytes)
    return app


def _target(request: Request) -> str:
    """Return the path and query of a request exactly as sent by the client."""
    raw: bytes = request.scope["raw_path"]
    if {b".", b".."}.intersection(raw.split(b"/")):  # which httpx would resolve: another route, with other rights
        raise InvalidRequest("the path must not contain the segments . and ..")
    query: bytes = request.scope["query_string"]
    return (raw + (b"?" + query if query else b"")).decode("latin-1")


def _add_admin(app: FastAPI, forwarder: Forwarder, max_body_bytes: int) -> None:
    @app.get("/health")
    @app.get("/live")
    async def live() -> dict[str, Any]:
        """Respond if the process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 once every pool, or a fallback of it, has a conductor that is ready."""
        good = {pool for pool, _, status, _ in await forwarder.everywhere("GET", "/ready", b"", {}) if status == 200}
        missing = [p for p in forwarder.pools.pools if not good.intersection(forwarder.pools.ways(p))]
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    @app.get("/pools")
    async def pools() -> dict[str, Any]:
        """Return the pools and their conductors."""
        return {
            name: [
                {"url": m.url, "open_requests": m.open_requests, "failures": m.num_failures}
                for m in members.in_order(0.0)
            ]
            for name, members in forwarder.members.items()
        }

    @app.post("/route")
    async def route(request: Request) -> dict[str, Any]:
        """Return the pools a body would go to, and why; nothing is forwarded."""
        body = await read_body(request, max_body_bytes)
        data = await made_ready(len(body) > INLINE_BYTES, parse_body, body)
        demand = demand_of(data, forwarder.pools.characters_per_token)
        prefill, decode = forwarder.pools.choose(demand)
        return {
            "prefill": prefill,
            "decode": decode,
            "prompt_tokens": demand.prompt_tokens,
            "context_tokens": demand.context_tokens,
            "ttft_s": demand.ttft_s,
            "tbt_s": demand.tbt_s,
        }

    @app.post("/abort_request")
    async def abort(request: Request) -> dict[str, Any]:
        """End a request on whichever conductor has it."""
        body = await read_body(request, max_body_bytes)
        answers = await forwarder.everywhere("POST", "/abort_request", body, dict(request.headers))
        counts = [answer.get("aborted", 0) for _, _, _, answer in answers if isinstance(answer, dict)]
        return {"aborted": sum(counts)}
