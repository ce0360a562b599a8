"""``tanghulu store serve``: the gateway process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from tanghulu.errors import TanghuluError, Unauthorized
from tanghulu.runtime.process import Process
from tanghulu.runtime.tasks import beside
from tanghulu.store.gateway import chunks_api, dashboard_api, events_api, nodes_api, values_api
from tanghulu.store.gateway.bounds import Bounded
from tanghulu.store.gateway.config import GatewayConfig
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.gateway.grpc_api import StorePort
from tanghulu.store.gateway.metrics import GatewayMetrics
from tanghulu.store.gateway.values_api import RangeNotSatisfiable
from tanghulu.types import Address
from tanghulu.version import __version__
from tanghulu.web import errors
from tanghulu.web.access import RouteRights
from tanghulu.web.routes import checked_target
from tanghulu.web.server import Server

#: Time for a client to send the whole header of a request, and to complete the TLS handshake before.
HEADER_S = 10.0
_READY_DEADLINE_S = 2.0
#: A caller's rights are decided by tokens, not by API keys.
_NO_KEYS = RouteRights({})
_ABOUT = """The store of tanghulu for curl, dashboards and orchestrators. Requests are done in the name of the token in
`Authorization: Bearer TOKEN`, with its rights; an operator's token acts for the tenant in `Tanghulu-Tenant`. Keys stand
in paths percent-encoded. Errors are `{"error": {"message", "type", "code", "param"}}`."""


async def serve(process: Process, config: GatewayConfig) -> None:
    """Run until the process is to stop, without waiting for an absent master: /ready reports it."""
    async with _serving(process, config) as address:
        process.ready(process.instance_id(address.port), address)
        await process.stopping.wait()


@contextlib.asynccontextmanager
async def _serving(process: Process, config: GatewayConfig) -> AsyncIterator[Address]:
    gateway = Gateway(config, GatewayMetrics(process.registry), process.stopping)
    http = Server(config, config.host)
    grpc = StorePort(gateway)
    app = http.authorized(make_app(gateway), _NO_KEYS)
    header_s = min(config.stall_s, HEADER_S)
    async with (
        contextlib.aclosing(gateway.clients),
        http.serving(app, config.port, config.grace_s, header_s=header_s, stall_s=config.stall_s) as server,
        beside(gateway.clients.sweep()),
    ):
        if config.grpc_port >= 0:
            await grpc.start(Address(config.host, config.grpc_port))
        try:
            yield Address(config.reachable_host, server.address.port)
        finally:
            server.stop()
            await grpc.stop(config.grace_s)


def make_app(gateway: Gateway) -> FastAPI:
    """Build the HTTP application: all routes on ``gateway``, the bounds in front of them, errors as answers."""
    app = FastAPI(title="tanghulu store", description=_ABOUT, version=__version__, redirect_slashes=False)
    errors.install(app, "the gateway")

    async def unsatisfiable(_: Request, error: Exception) -> Response:
        assert isinstance(error, RangeNotSatisfiable)
        return values_api.unsatisfiable(error)

    app.add_exception_handler(RangeNotSatisfiable, unsatisfiable)
    app.add_middleware(
        Bounded, place=gateway.place, store=gateway.store, stall_s=gateway.config.stall_s, metrics=gateway.metrics
    )
    for router in (_health(gateway), dashboard_api.router(gateway)):
        app.include_router(router)
    for api in (values_api, chunks_api, nodes_api, events_api):
        app.include_router(api.router(gateway), dependencies=[Depends(checked_target)])
    return app


def _health(gateway: Gateway) -> APIRouter:
    """Return the routes for orchestrators; none of them needs a token."""
    api = APIRouter(tags=["health"])

    @api.get("/health", summary="Whether the process answers")
    @api.get("/live", include_in_schema=False)
    async def health() -> dict[str, Any]:
        """Report liveness; says nothing of the store."""
        return {"status": "ok"}

    @api.get("/ready", summary="Whether the store would serve", responses={503: {"description": "and what is missing"}})
    async def ready() -> Response:
        """200 if a master answers and there are nodes; else 503 and what is missing."""
        missing = await _missing(gateway)
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    return api


async def _missing(gateway: Gateway) -> list[str]:
    own = gateway.config.master.credentials
    try:
        async with gateway.clients.of(own) as client:
            views = await client.nodes_now(min(_READY_DEADLINE_S, gateway.config.deadline_s))
    except Unauthorized as error:
        # A gateway without a token of its own serves callers that bring theirs: it is enough that the master answers.
        return [error.message] if own.shown else []
    except TanghuluError as error:
        return [error.message]
    return [] if views else ["no store node has registered at the master"]
