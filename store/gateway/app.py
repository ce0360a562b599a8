"""The gateway's HTTP application: all routes, the bounds in front of them, errors as answers."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from tanghulu.store.gateway import chunks_api, events_api, health_api, nodes_api, values_api
from tanghulu.store.gateway.bounds import Bounded
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.gateway.ranges import RangeNotSatisfiable
from tanghulu.version import __version__
from tanghulu.web import errors

_ABOUT = """The store of tanghulu for curl, dashboards and orchestrators. Requests are done in the name of the token in
`Authorization: Bearer TOKEN`, with its rights; an operator's token acts for the tenant in `Tanghulu-Tenant`. Keys stand
in paths percent-encoded. Errors are `{"error": {"message", "type", "code", "param"}}`."""


def make_app(gateway: Gateway) -> FastAPI:
    """All routes on ``gateway``."""
    app = FastAPI(title="tanghulu store", description=_ABOUT, version=__version__, redirect_slashes=False)
    errors.install(app, "the gateway")

    async def unsatisfiable(_: Request, error: Exception) -> Response:
        assert isinstance(error, RangeNotSatisfiable)
        return values_api.unsatisfiable(error)

    app.add_exception_handler(RangeNotSatisfiable, unsatisfiable)
    app.add_middleware(Bounded, requests=gateway.requests, stall_s=gateway.config.stall_s, metrics=gateway.metrics)
    for api in (health_api, values_api, chunks_api, nodes_api, events_api):
        app.include_router(api.router(gateway))
    return app
