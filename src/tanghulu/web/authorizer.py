"""Who is let through to an application's routes, where it was started with ``--api-keys``.

An ASGI application around the routes. A key comes as ``Authorization: Bearer KEY``, as ``x-api-key``, or, for people
with a browser, in a cookie that the page at /login sets. Routes find the key in the request's state, as ``api_key``;
those whose answers have no end ask ``key_stands`` there. What belongs into the answer's header is ``headers``. A table
says for each route what a key must allow; a test compares it with the application's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from tanghulu.auth.api_keys import ApiKey, ApiKeysFile, KeyRight
from tanghulu.auth.key_limits import KeyAccounts, RateLimitExceeded
from tanghulu.errors import Forbidden, TanghuluError, Unauthorized
from tanghulu.web.errors import answer_to, log_failure
from tanghulu.web.login import LOGIN, LoginPage

REFRESH_S: Final = 1.0
COOKIE: Final = "tanghulu_key"
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_LOGIN_PAGE: Final = LoginPage("key", "API key", COOKIE)


class Need(Enum):
    """What a route asks of a caller; the value is for the documentation."""

    NOTHING = "no key"
    ANY_KEY = "any key"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


_RIGHTS: Final = {need: KeyRight(need.value) for need in (Need.INFERENCE, Need.METRICS, Need.ADMIN)}


class RouteRights:
    """The needs of an application's routes, by their paths as the application has them; of other paths: any key."""

    def __init__(self, table: Mapping[str, Need]) -> None:
        self.table = dict(table)
        self._patterns = [(compile_path(path)[0], need) for path, need in table.items()]  # as the application matches

    def of(self, path: str) -> Need:
        """What a request for ``path`` needs."""
        known = self.table.get(path)
        if known is not None:
            return known
        return next((need for pattern, need in self._patterns if pattern.match(path)), Need.ANY_KEY)


class HttpAuthorizer:
    """``app`` for callers with a key that allows what they ask for. ``accounts`` None: another process counts."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeysFile, rights: RouteRights, accounts: KeyAccounts | None = None
    ) -> None:
        self._app, self._keys, self._rights, self._accounts = app, keys, rights, accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        need = self._rights.of(scope["path"])
        if scope["path"] == LOGIN:
            answer = await _LOGIN_PAGE.log_in(scope, receive, self._known)
            if answer is not None:
                await answer(scope, receive, send)
            return
        if need is Need.NOTHING:
            await self._app(scope, receive, send)
            return
        try:
            key = self._admitted(scope, need)
        except TanghuluError as error:
            log_failure(error, scope)
            await _LOGIN_PAGE.refusal(scope, error)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(api_key=key, key_stands=partial(self._stands, key))
        if need is not Need.INFERENCE or self._accounts is None:
            await self._app(scope, receive, send)
        else:
            await self._counted(self._accounts, key, scope, receive, send)

    async def watch(self) -> None:
        """Follow the file of keys until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if await asyncio.to_thread(self._keys.refresh) and self._accounts is not None:
                self._accounts.keep(self._keys.table)

    def _stands(self, key: ApiKey) -> bool:
        return self._keys.table.still_stands(key, time.time())

    def _admitted(self, scope: Scope, need: Need) -> ApiKey:
        """The key of a request that may be made with it. Raises Unauthorized, Forbidden."""
        headers = Headers(scope=scope)
        shown, by_cookie = _shown(headers)
        key = self._keys.table.authenticate(shown)
        if by_cookie and scope["method"] not in _SAFE:
            _refuse_other_sites(headers)
        right = _RIGHTS.get(need)
        if right is not None:
            key.require(right, f"{scope['method']} {scope['path']}")
        return key

    async def _counted(self, accounts: KeyAccounts, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        account, now_s = accounts.of(key, time.monotonic()), time.monotonic()
        try:
            account.begin(now_s)
        except RateLimitExceeded as error:
            scope["state"]["headers"] = account.headers(now_s)
            log_failure(error, scope)
            await answer_to(error, max(1, round(error.retry_after_s + 0.5)))(scope, receive, send)
            return
        scope["state"]["headers"] = account.headers(now_s)
        try:
            await self._app(scope, receive, send)
        finally:
            account.end()

    async def _known(self, shown: str) -> None:
        """Raise Unauthorized for what is no key."""
        self._keys.table.authenticate(shown)


def _shown(headers: Headers) -> tuple[str, bool]:
    """The key that a request shows, and whether it comes in a cookie. Raises Unauthorized."""
    given = headers.get("authorization")
    if given is not None:
        scheme, _, key = given.strip().partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("the header Authorization is not of the form: Bearer KEY")
        return key.strip(), False
    if (own := headers.get("x-api-key")) is not None:
        return own.strip(), False
    kept = _LOGIN_PAGE.shown(headers)
    return (kept or "", kept is not None)


def _refuse_other_sites(headers: Headers) -> None:
    """Raise Forbidden for a change that another page has a browser ask for, with the cookie of this one."""
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc != headers.get("host"):
        raise Forbidden("with a cookie only pages of this address may change anything; send Authorization: Bearer KEY")
