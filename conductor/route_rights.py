"""Key permissions needed by each HTTP route of a process started with ``--api-keys``: one table per process.

/live and /ready are for orchestrators, which have no keys. /health shows the workers, so it needs some valid key, as do
the pages that explain the API. A route missing here fails a test.
"""

from __future__ import annotations

from typing import Final

from tanghulu.web.access import Need, RouteRights
from tanghulu.web.routes import rest

_PROBES: Final = dict.fromkeys(("/live", "/ready"), Need.NOTHING)

CONDUCTOR: Final = RouteRights(
    {
        **_PROBES,
        "/health": Need.ANY_KEY,
        "/health_generate": Need.METRICS,
        "/metrics": Need.METRICS,
        "/dashboard": Need.METRICS,
        "/dashboard/state": Need.METRICS,
        "/dashboard/events": Need.METRICS,
        "/debug/requests": Need.METRICS,
        "/debug/requests/{name:path}": Need.METRICS,
        "/": Need.ANY_KEY,
        "/docs": Need.ANY_KEY,
        "/openapi.json": Need.ANY_KEY,
        "/v1/models": Need.ANY_KEY,
        "/v1/models/{name:path}": Need.ANY_KEY,
        "/model_info": Need.ANY_KEY,
        "/get_model_info": Need.ANY_KEY,
        "/server_info": Need.ANY_KEY,
        "/get_server_info": Need.ANY_KEY,
        "/v1/chat/completions": Need.INFERENCE,
        "/v1/completions": Need.INFERENCE,
        "/v1/responses": Need.INFERENCE,
        "/v1/responses/{response_id}": Need.INFERENCE,
        "/generate": Need.INFERENCE,
        "/abort_request": Need.INFERENCE,
        "/tokenize": Need.INFERENCE,
        "/detokenize": Need.INFERENCE,
        "/route": Need.INFERENCE,
        "/flush_cache": Need.ADMIN,
    }
)
"""Routes of the conductor."""

_ROUTERS_OWN: Final = {
    **_PROBES,
    "/health": Need.ANY_KEY,
    "/metrics": Need.METRICS,
    "/docs": Need.ANY_KEY,
    "/docs/oauth2-redirect": Need.ANY_KEY,
    "/redoc": Need.ANY_KEY,
    "/openapi.json": Need.ANY_KEY,
}

POOL_ROUTER: Final = RouteRights(
    {
        **_ROUTERS_OWN,
        "/v1/chat/completions": Need.INFERENCE,
        "/v1/completions": Need.INFERENCE,
        "/v1/responses": Need.INFERENCE,
        "/v1/responses/{response_id}": Need.INFERENCE,
        "/generate": Need.INFERENCE,
        "/v1/models": Need.ANY_KEY,
        "/v1/models/{name:path}": Need.ANY_KEY,
        "/model_info": Need.ANY_KEY,
        "/get_model_info": Need.ANY_KEY,
        "/server_info": Need.ANY_KEY,
        "/get_server_info": Need.ANY_KEY,
        "/tokenize": Need.INFERENCE,
        "/detokenize": Need.INFERENCE,
        "/abort_request": Need.INFERENCE,
        "/route": Need.INFERENCE,
        "/pools": Need.METRICS,
    }
)
"""Routes of the router with pools; the conductors behind it check the key again, and count the usage."""

ROUTING_SERVICE: Final = RouteRights(
    {
        **_ROUTERS_OWN,
        "/workers": Need.ADMIN,
        "/workers/" + rest("worker"): Need.ADMIN,
        "/report_load": Need.ADMIN,
        "/publish_events": Need.ADMIN,
        "/dump_events": Need.ADMIN,
        "/generate": Need.INFERENCE,
        "/best_worker": Need.INFERENCE,
        "/add_request": Need.INFERENCE,
        "/prefill_completed": Need.INFERENCE,
        "/free": Need.INFERENCE,
        "/overlaps": Need.INFERENCE,
        "/potential_loads": Need.INFERENCE,
    }
)
"""Routes of the routing service: queries need the right to inference, reports about workers that of an admin."""
