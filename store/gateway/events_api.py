"""The route that follows the directory: stored and removed keys, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, cast

import structlog
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import Unauthorized
from tanghulu.store.admin import rows
from tanghulu.store.admin.rows import Beginning
from tanghulu.store.directory_feed import DirectoryEvent, follow_directory
from tanghulu.store.gateway.clients import VERIFY_S, GatewayClient
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.gateway.metrics import EVENTS_ROUTE

_log = structlog.get_logger(__name__)
#: Silent periods of VERIFY_S after which a beat is sent.
_BEAT_AFTER = 15
_BEAT = ": beat\n\n"
#: The key requested to learn whether the token may read; any key will do.
_PROBE = "events"
_SCHEMA = {200: {"content": {"text/event-stream": {}}, "description": "events without end"}}


def router(gateway: Gateway) -> APIRouter:
    """Return the route."""
    api = APIRouter(tags=["store"])

    @api.get(
        EVENTS_ROUTE,
        summary="Follow what is stored and removed",
        responses=cast("dict[int | str, dict[str, Any]]", _SCHEMA),
        response_class=StreamingResponse,
    )
    async def events(
        prefix: Annotated[str, Query(description="only keys that begin so")] = "",
        snapshot: Annotated[bool, Query(description="start with the existing keys")] = True,
        *,
        request: Request,
    ) -> Response:
        """`event:` is reset, stored, removed, node_gone or synced; `data:` an object as `watch --json` prints.

        After an interruption of the master it resumes, with a reset and all existing keys if it has to start over.
        """
        return _EventsReply(gateway, request, prefix, snapshot)

    return api


class _EventsReply(Response):
    """The event stream; ends with the client, the process, or the token."""

    def __init__(self, gateway: Gateway, request: Request, prefix: str, snapshot: bool) -> None:
        super().__init__()
        self._gateway = gateway
        self._request = request
        self._prefix = prefix
        self._beginning = Beginning(snapshot=snapshot)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        credentials = self._gateway.credentials_of(self._request.headers)
        with self._gateway.streams.holding():
            async with self._gateway.clients.of(credentials) as client:
                await client.exists(_PROBE)  # raises Forbidden, which the stream itself would wait out
                reply = StreamingResponse(self._texts(client, credentials), media_type="text/event-stream")
                reply.headers["cache-control"] = "no-cache"
                await reply(scope, receive, send)

    async def _texts(self, client: GatewayClient, credentials: Credentials) -> AsyncIterator[str]:
        masters = self._gateway.clients.masters.showing(credentials)
        yield _BEAT  # the header is sent at once
        stopping = asyncio.create_task(self._gateway.stopping.wait())
        try:
            async with aclosing(cast(Any, follow_directory(masters, self._prefix))) as batches:
                coming: asyncio.Task[list[DirectoryEvent]] | None = None
                num_silent = 0
                try:
                    while not stopping.done():
                        coming = coming or asyncio.create_task(anext(batches))
                        await asyncio.wait({coming, stopping}, timeout=VERIFY_S, return_when=asyncio.FIRST_COMPLETED)
                        await self._gateway.clients.verify(credentials, client)
                        num_silent = 0 if coming.done() else num_silent + 1
                        if not coming.done():
                            if num_silent % _BEAT_AFTER == 0:
                                yield _BEAT
                            continue
                        for event in coming.result():
                            yield self._text(event)
                        coming = None
                finally:
                    if coming is not None:
                        coming.cancel()
                        await asyncio.gather(coming, return_exceptions=True)
        except Unauthorized as error:
            _log.warning("gateway.events_ended", error=error.message)
        finally:
            stopping.cancel()

    def _text(self, event: DirectoryEvent) -> str:
        shown = rows.events(event) if self._beginning.shows(event) else ()
        return "".join(f"event: {row['event']}\ndata: {json.dumps(row)}\n\n" for row in shown)
