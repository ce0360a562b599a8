"""Key permissions needed by each HTTP route of a process started with ``--api-keys``: one table per process.

/live and /ready are for orchestrators, which have no keys. /health shows the workers, so it needs some valid key, as do
the pages that explain the API. A route missing here fails a test.
"""

from __future__ import annotations

from typing import Final

from tanghulu.web.access import Need, RouteRights
from tanghulu.web.routes import rest

_PROBES: Final = {Need.NOTHING: ("/live", "/ready")}
_MODELS: Final = (
    *("/v1/models", "/v1/models/{name:path}"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info"),
)
_INFERENCE: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}", "/generate"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/abort_request", "/tokenize", "/detokenize", "/route"),
)
#: FastAPI's pages on a router.
_PAGES: Final = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")

CONDUCTOR: Final = RouteRights(
    _PROBES
    | {
        Need.ANY_KEY: ("/health", "/", "/docs", "/openapi.json", *_MODELS),
        Need.METRICS: (
            *("/metrics", "/health_generate", "/dashboard", "/dashboard/state", "/dashboard/events"),
            *("/debug/requests", "/debug/requests/{name:path}", "/debug/curve"),
        ),
        Need.INFERENCE: _INFERENCE,
        Need.ADMIN: ("/flush_cache",),
    }
)
"""Routes of the conductor."""

POOL_ROUTER: Final = RouteRights(
    _PROBES
    | {
        Need.ANY_KEY: ("/health", *_PAGES, *_MODELS),
        Need.METRICS: ("/metrics", "/pools"),
        Need.INFERENCE: _INFERENCE,
    }
)
"""Routes of the router with pools; the conductors behind it check the key again, and count the usage."""

ROUTING_SERVICE: Final = RouteRights(
    _PROBES
    | {
        Need.ANY_KEY: ("/health", *_PAGES),
        Need.METRICS: ("/metrics",),
        Need.INFERENCE: (
            *("/generate", "/best_worker", "/add_request", "/prefill_completed", "/free"),
            *("/overlaps", "/potential_loads"),
        ),
        Need.ADMIN: ("/workers", "/workers/" + rest("worker"), "/report_load", "/publish_events", "/dump_events"),
    }
)
"""Routes of the routing service: queries need the right to inference, reports about workers that of an admin."""
