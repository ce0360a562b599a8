"""Routes for people: /dashboard, the store's activity, live, with the rights of the browser's token."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError, Unauthorized
from tanghulu.store.client.model import NodeView
from tanghulu.store.dashboard import page as shown
from tanghulu.store.dashboard.view import StoreView
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.gateway.metrics import DASHBOARD_EVENTS_ROUTE
from tanghulu.web.access import LOGIN, LoginPage

COOKIE = "tanghulu_token"
#: Number of tokens whose figures of the last minutes are kept.
MAX_VIEWS = 32
_PAGE = LoginPage("token", "Token", COOKIE)


class _Views:
    """The views of the most recent tokens."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._views: OrderedDict[Credentials, StoreView] = OrderedDict()

    def of(self, credentials: Credentials) -> StoreView:
        """Return the view for ``credentials``."""
        view = self._views.setdefault(credentials, self._new(credentials))
        self._views.move_to_end(credentials)
        if len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return view

    def _new(self, credentials: Credentials) -> StoreView:
        clients, deadline_s = self._gateway.clients, self._gateway.config.deadline_s

        async def nodes() -> list[NodeView]:
            async with clients.of(credentials) as client:
                return await client.nodes_now(deadline_s)

        async def tenants() -> list[dict[str, Any]]:
            async with clients.of(credentials) as client:
                return [asdict(each) for each in await client.tenants(deadline_s=deadline_s)]

        return StoreView(nodes, tenants, credentials)


def router(gateway: Gateway) -> APIRouter:
    """Return the routes."""
    api, views = APIRouter(include_in_schema=False), _Views(gateway)

    @api.get("/dashboard")
    async def page(request: Request) -> Response:
        """Serve the page to callers with a token, or to all if none is needed; others get the form to enter theirs."""
        try:
            await _admit(gateway, _credentials(gateway, request))
        except TanghuluError as error:
            return _PAGE.refusal(request.scope, error)
        return shown.page()

    @api.get("/dashboard/state")
    async def state(request: Request) -> Response:
        """The page's data, once."""
        credentials = _credentials(gateway, request)
        await _admit(gateway, credentials)
        return shown.once(await views.of(credentials).state())

    @api.get(DASHBOARD_EVENTS_ROUTE)
    async def events(request: Request) -> Response:
        """The page's data, once a second, as server-sent events."""
        credentials = _credentials(gateway, request)
        return _Stream(gateway, credentials, views.of(credentials))

    @api.api_route(LOGIN, methods=["GET", "POST"])
    async def login(request: Request) -> Response:
        """Log a browser in with its token."""

        async def known(token: str) -> None:
            if not token.isascii() or not token.isprintable():
                raise Unauthorized("the form contains no token; enter yours")
            await _admit(gateway, Credentials("", token, gateway.config.master.credentials.tls))

        return await _PAGE.log_in(request.scope, request.receive, known) or Response()

    return api


def _credentials(gateway: Gateway, request: Request) -> Credentials:
    """Return the header's credentials, which pages cannot set, or else the cookie's; these routes only read."""
    kept = _PAGE.shown(request.headers)
    if kept and "authorization" not in request.headers:
        return Credentials("", kept, gateway.config.master.credentials.tls)
    return gateway.credentials_of(request.headers)


async def _admit(gateway: Gateway, credentials: Credentials) -> None:
    """Raise Unauthorized for a token that the store rejects, MasterUnavailable if no master answers."""
    async with gateway.clients.of(credentials):
        pass


class _Stream(Response):
    """The stream of states, until the client, the process or the token ends."""

    def __init__(self, gateway: Gateway, credentials: Credentials, view: StoreView) -> None:
        super().__init__()
        self._gateway, self._credentials, self._view = gateway, credentials, view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        with self._gateway.streams.holding():
            await _admit(self._gateway, self._credentials)
            reply = shown.stream(self._view.state, self._goes_on)
            await reply(scope, receive, send)

    async def _goes_on(self) -> bool:
        """Return whether neither the process nor the token has ended in ``PERIOD_S``."""
        try:
            async with asyncio.timeout(shown.PERIOD_S):
                await self._gateway.stopping.wait()
        except TimeoutError:
            pass
        try:
            await _admit(self._gateway, self._credentials)
        except Unauthorized:
            return False
        except TanghuluError:
            pass  # the page shows that the master does not answer
        return not self._gateway.stopping.is_set()
