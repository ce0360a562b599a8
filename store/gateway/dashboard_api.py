"""Routes for people: /dashboard, what the store does, live, with the rights of the token that the browser was given."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from tanghulu.store.dashboard.events import EventLog
from tanghulu.store.dashboard.nodes import NodesSeen, Recent, see_nodes

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError, Unauthorized
from tanghulu.runtime.scraping import summed_by
from tanghulu.store.admin.rows import plain
from tanghulu.store.client.model import NodeView
from tanghulu.store.dashboard import page as shown
from tanghulu.store.dashboard.history import StoreCounters, StoreHistory
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.gateway.metrics import DASHBOARD_EVENTS_ROUTE
from tanghulu.version import __version__
from tanghulu.web.access import LOGIN, LoginPage

COOKIE = "tanghulu_token"
#: Tokens whose figures of the last minutes are kept.
MAX_VIEWS = 32
_PAGE = LoginPage("token", "Token", COOKIE)


class StoreView:
    """What the page shows to one token. There is a past to show as far as somebody has watched."""

    def __init__(self, gateway: Gateway, credentials: Credentials) -> None:
        self._gateway, self._credentials = gateway, credentials
        self._history, self._events = StoreHistory(), EventLog()
        self._nodes: list[NodeView] = []
        self._recent = Recent(self._look)

    async def state(self) -> dict[str, Any]:
        """All that the page shows, as it is now or was a moment ago."""
        return await self._recent.get()

    async def _look(self) -> dict[str, Any]:
        seen = await see_nodes(self._list_nodes, self._nodes, {}, self._credentials)
        self._nodes, at_s, samples = seen.nodes, time.time(), seen.samples
        self._history.append(at_s, {name: StoreCounters.on(page) for name, page in seen.pages.items() if page})
        self._note(at_s, seen)
        return {
            "version": __version__,
            "at_s": at_s,
            "now": self._now(seen),
            "points": self._history.points(shown.MAX_POINTS),
            "events": self._events.last(shown.MAX_SHOWN),
            "error": seen.error,
            "nodes": seen.rows,
            "silent": seen.silent,
            **await self._tenants(),
            **({"traffic": _traffic(seen), "evictions_by": _evictions(seen)} if samples else {}),
        }

    def _now(self, seen: NodesSeen) -> dict[str, Any]:
        """The figures at the top; those that come from metrics only if the token may see any."""
        known = {
            "num_nodes": len(seen.nodes),
            "num_chunks": sum(node.num_chunks for node in seen.nodes),
            "used_bytes": sum(node.used_bytes for node in seen.nodes),
            "ssd_used_bytes": sum(node.ssd_used_bytes for node in seen.nodes),
        }
        return known | (self._history.now() if seen.samples else {})

    def _note(self, at_s: float, seen: NodesSeen) -> None:
        grown = self._history.grown
        self._events.states(at_s, "node", {row["id"]: row["state"] for row in seen.rows})
        self._events.count(at_s, "eviction", grown.evictions, "chunks evicted: {}")
        self._events.count(at_s, "corruption", grown.corrupt_chunks, "corrupt chunks dropped: {}")

    async def _list_nodes(self) -> list[NodeView]:
        async with self._gateway.clients.of(self._credentials) as client:
            return await client.nodes_now(self._gateway.config.deadline_s)

    async def _tenants(self) -> dict[str, Any]:
        """The tenants that the token is told of; nothing where there are none, or the nodes do not answer."""
        try:
            async with self._gateway.clients.of(self._credentials) as client:
                return {"tenants": plain(await client.tenants(deadline_s=self._gateway.config.deadline_s))}
        except TanghuluError:
            return {}


class _Views:
    """The views of the tokens that watched last."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._views: OrderedDict[Credentials, StoreView] = OrderedDict()

    def of(self, credentials: Credentials) -> StoreView:
        """The view of who shows ``credentials``."""
        view = self._views.setdefault(credentials, StoreView(self._gateway, credentials))
        self._views.move_to_end(credentials)
        if len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return view


def router(gateway: Gateway) -> APIRouter:
    """The routes."""
    api, views = APIRouter(include_in_schema=False), _Views(gateway)

    @api.get("/dashboard")
    async def page(request: Request) -> Response:
        """The page, for who has a token, or needs none here; others are asked for theirs."""
        try:
            await _admit(gateway, _credentials(gateway, request))
        except TanghuluError as error:
            return _PAGE.refusal(request.scope, error)
        return shown.page()

    @api.get("/dashboard/state")
    async def state(request: Request) -> Response:
        """What the page shows, once."""
        credentials = _credentials(gateway, request)
        await _admit(gateway, credentials)
        return shown.once(await views.of(credentials).state())

    @api.get(DASHBOARD_EVENTS_ROUTE)
    async def events(request: Request) -> Response:
        """What the page shows, once a second, as server-sent events."""
        credentials = _credentials(gateway, request)
        return _Stream(gateway, credentials, views.of(credentials))

    @api.api_route(LOGIN, methods=["GET", "POST"])
    async def login(request: Request) -> Response:
        """Where a browser shows its token."""

        async def known(token: str) -> None:
            if not token.isascii() or not token.isprintable():
                raise Unauthorized("that is no token")
            await _admit(gateway, Credentials("", token, gateway.config.master.credentials.tls))

        return await _PAGE.log_in(request.scope, request.receive, known) or Response()

    return api


def _credentials(gateway: Gateway, request: Request) -> Credentials:
    """Those of the cookie, where the request shows none in a header, which pages cannot set; these routes only read."""
    kept = _PAGE.shown(request.headers)
    if kept and "authorization" not in request.headers:
        return Credentials("", kept, gateway.config.master.credentials.tls)
    return gateway.credentials_of(request.headers)


async def _admit(gateway: Gateway, credentials: Credentials) -> None:
    """Raise Unauthorized for a token that the store does not know, MasterUnavailable if nobody can say."""
    async with gateway.clients.of(credentials):
        pass


class _Stream(Response):
    """The states, until the client, the process or the token ends."""

    def __init__(self, gateway: Gateway, credentials: Credentials, view: StoreView) -> None:
        super().__init__()
        self._gateway, self._credentials, self._view = gateway, credentials, view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        with self._gateway.streams.holding():
            await _admit(self._gateway, self._credentials)
            reply = StreamingResponse(self._states(), media_type="text/event-stream")
            reply.headers["cache-control"] = "no-cache"
            await reply(scope, receive, send)

    async def _states(self) -> AsyncIterator[bytes]:
        while not self._gateway.stopping.is_set():
            yield shown.event(await self._view.state())
            try:
                async with asyncio.timeout(shown.PERIOD_S):
                    await self._gateway.stopping.wait()
            except TimeoutError:
                pass
            try:
                await _admit(self._gateway, self._credentials)
            except Unauthorized:
                return
            except TanghuluError:
                continue  # the page says that the master does not answer


def _traffic(seen: NodesSeen) -> list[dict[str, Any]]:
    found = {
        way: summed_by(seen.samples, f"tanghulu_node_{way}_bytes_total", "transport") for way in ("read", "written")
    }
    return [
        {"transport": transport, **{f"{way}_bytes": by.get((transport,), 0.0) for way, by in found.items()}}
        for (transport,) in sorted(found["read"].keys() | found["written"].keys())
    ]


def _evictions(seen: NodesSeen) -> dict[str, float]:
    found = summed_by(seen.samples, "tanghulu_node_evictions_by_reason_total", "reason")
    return {reason: number for (reason,), number in sorted(found.items())}
