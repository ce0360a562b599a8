"""Routes for orchestrators: whether the process lives, whether the store would serve, the gateway's metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from tanghulu.errors import TanghuluError, Unauthorized
from tanghulu.store.gateway.gateway import Gateway

_READY_DEADLINE_S = 2.0


def router(gateway: Gateway) -> APIRouter:
    """The routes; none of them asks for a token."""
    api = APIRouter(tags=["health"])

    @api.get("/health", summary="Whether the process answers")
    @api.get("/live", include_in_schema=False)
    async def health() -> dict[str, Any]:
        """Says nothing of the store."""
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
        # A gateway without a token of its own serves those who bring theirs: it is enough that the master answers.
        return [error.message] if own.shown else []
    except TanghuluError as error:
        return [error.message]
    return [] if views else ["no store node has registered at the master"]
