"""Access control of an application: only pages of this site, and, with ``--api-keys``, callers with a key.

``OwnSite`` rejects requests made by pages of other sites in a browser, so that no web page reaches a port behind its
user's back. Browsers state the origin of a request: ``Origin``, and ``Sec-Fetch-Site``. A page fetched from a name that
now resolves to this machine (DNS rebinding) has the same origin, but its name is in ``Host``: so a port on loopback
answers to addresses, to names without a dot, which no stranger owns, and to configured names. Programs send no Origin;
a link to a page of ours is followed.

``HttpAuthorizer`` requires a key: ``Authorization: Bearer KEY``, ``x-api-key``, or, for people with a browser, the
cookie set by the page at /login. Routes find the key in the request's state, as ``api_key``; those with endless
answers check ``key_stands`` there. Fields for the answer's header are in ``headers``. A table gives the right that each
route requires of a key; a test compares it with the application's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from tanghulu.auth.api_keys import ApiKey, ApiKeysFile, KeyRight
from tanghulu.auth.key_limits import KeyAccounts, RateLimitExceeded
from tanghulu.errors import Forbidden, Overloaded, TanghuluError, Unauthorized
from tanghulu.types import is_loopback
from tanghulu.web.bodies import IncomingBody, pieces
from tanghulu.web.errors import answer_to, log_failure

LOGIN: Final = "/login"
_MAX_FORM_BYTES: Final = 4096
_FORM_S: Final = 10.0
#: Maximum forms being received: strangers send them, and each occupies a connection meanwhile.
_MAX_FORMS: Final = 16
_STYLE: Final = "body{font:16px/1.5 system-ui,sans-serif;max-width:24rem;margin:20vh auto;padding:0 1rem}"
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY: Final = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'self'"
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tanghulu: {what}</title>
<meta name="viewport" content="width=device-width"><style>{style}</style></head><body><h1>A {what} is needed</h1>
<p>{message}</p><form method="post" action="/login"><input type="hidden" name="next" value="{next}">
<label>{label} <input type="password" name="key" autocomplete="current-password" required autofocus></label>
<button>Go on</button></form></body></html>
"""
REFRESH_S: Final = 1.0
COOKIE: Final = "tanghulu_key"
_SAFE: Final = ("GET", "HEAD", "OPTIONS")


def listed(text: str) -> tuple[str, ...]:
    """Return the values of an option, separated by commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


class OwnSite:
    """``app``, which listens on ``host``, for programs, its own pages, and pages of ``origins`` ("*" for all).

    If only this machine reaches ``host``, requests must be for an address, a name without a dot, or one of ``names``.
    """

    def __init__(self, app: ASGIApp, host: str, names: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._app, self._origins = app, frozenset(origins)
        self._names = frozenset(map(str.lower, names)) if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._admit(scope["method"], Headers(scope=scope))
            except Forbidden as error:
                log_failure(error, scope)
                await answer_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, method: str, headers: Headers) -> None:
        """Raise Forbidden for a request of another site's page, or for a name that is not this port's."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name_of(host)
        if self._names is not None and "." in name and name not in self._names and not _is_address(name):
            raise Forbidden(
                f"host {name[:128]!r} is not allowed on this loopback port; use localhost, or list the name in "
                "--allowed-hosts"
            )
        if origin is not None:
            foreign = _site_of(origin) != host and not {origin, "*"} & self._origins
        else:  # a followed link has no origin
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            foreign = headers.get("sec-fetch-site") == "cross-site" and not is_link and "*" not in self._origins
        if foreign:
            raise Forbidden(f"pages of {(origin or 'other sites')[:128]} may not use this port; see --cors-origins")


def _site_of(origin: str) -> str | None:
    """Return the host and port in an Origin header; None if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and not port.endswith("]") else host).lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class LoginPage:
    """The page that requests ``what`` ("key", "token"), labelled ``label``, and the cookie that keeps it."""

    def __init__(self, what: str, label: str, cookie: str) -> None:
        self._what, self._label, self._cookie = what, label, cookie
        self._num_forms = 0

    def shown(self, headers: Headers) -> str | None:
        """Return the value of the request's cookie."""
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return None
        return morsel.value if morsel is not None else None

    def refusal(self, scope: Scope, error: TanghuluError) -> Response:
        """Return the page if a browser wants one, else the error in the usual form."""
        wants_page = "text/html" in Headers(scope=scope).get("accept", "")
        if wants_page and scope["method"] == "GET" and type(error) is Unauthorized:
            return self.page(error.message, scope["path"], 401)
        return answer_to(error)

    def page(self, message: str, wanted: str, status: int) -> Response:
        """Return the page, which leads to ``wanted``."""
        texts = {"what": self._what, "label": self._label, "message": html.escape(message)}
        text = _PAGE.format(style=_STYLE, next=html.escape(_own_path(wanted)), **texts)
        headers = {"content-security-policy": _POLICY, "cache-control": "no-store"}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        return HTMLResponse(text, status, headers)

    async def log_in(self, scope: Scope, receive: Receive, admit: Callable[[str], Awaitable[None]]) -> Response | None:
        """Return the answer to a GET or POST of /login; None after a disconnect. ``admit`` raises Unauthorized."""
        if scope["method"] != "POST":
            return self.page("Whoever runs this cluster has one for you.", "/dashboard", 200)
        try:
            form = await self._read_form(scope, receive)
            wanted = form.get("next", "")
            shown = form.get("key", "").strip()
            await admit(shown)
        except ClientDisconnect:
            return None
        except Unauthorized as error:
            return self.page(error.message, wanted, 401)
        except TanghuluError as error:
            return answer_to(error)
        answer = RedirectResponse(_own_path(wanted), 303)
        secure = scope["scheme"] == "https"
        answer.set_cookie(self._cookie, shown, path="/", httponly=True, samesite="strict", secure=secure)
        return answer

    async def _read_form(self, scope: Scope, receive: Receive) -> dict[str, str]:
        """Return the fields of a form; raises BodyTooLarge, BodyTooSlow, Overloaded."""
        if self._num_forms >= _MAX_FORMS:
            raise Overloaded(f"{_MAX_FORMS} logins are in progress; retry in a moment")
        self._num_forms += 1
        try:
            body = IncomingBody(scope, receive, _FORM_S, _FORM_S)
            data = b"".join([piece async for piece in pieces(body, _MAX_FORM_BYTES)])
        finally:
            self._num_forms -= 1
        return {name: values[-1] for name, values in parse_qs(data.decode("utf-8", "replace")).items()}


def _own_path(wanted: str) -> str:
    """Return ``wanted`` if it is a path of this server, not another host's."""
    plain = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if plain else "/dashboard"


_LOGIN_PAGE: Final = LoginPage("key", "API key", COOKIE)


class Need(Enum):
    """The requirement of a route on its caller; the value is for the documentation."""

    NOTHING = "no key"
    ANY_KEY = "any key"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


_RIGHTS: Final = {need: KeyRight(need.value) for need in (Need.INFERENCE, Need.METRICS, Need.ADMIN)}


class RouteRights:
    """The requirements of an application's routes, named by their ``paths`` there; other paths need any key."""

    def __init__(self, paths: Mapping[Need, Iterable[str]]) -> None:
        self.table = {path: need for need, named in paths.items() for path in named}
        # matched like the application
        self._patterns = [(compile_path(path)[0], need) for path, need in self.table.items()]

    def of(self, path: str) -> Need:
        """Return the requirement of a request for ``path``."""
        known = self.table.get(path)
        if known is not None:
            return known
        return next((need for pattern, need in self._patterns if pattern.match(path)), Need.ANY_KEY)


class HttpAuthorizer:
    """``app`` for callers with a key that allows the request. With ``accounts`` None another process counts."""

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
        """Follow the file of keys; runs until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if await asyncio.to_thread(self._keys.refresh) and self._accounts is not None:
                self._accounts.keep(self._keys.table)

    def _stands(self, key: ApiKey) -> bool:
        return self._keys.table.still_stands(key, time.time())

    def _admitted(self, scope: Scope, need: Need) -> ApiKey:
        """Return the key of a request if it allows the request. Raises Unauthorized, Forbidden."""
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
        """Raise Unauthorized for an unknown key."""
        self._keys.table.authenticate(shown)


def _shown(headers: Headers) -> tuple[str, bool]:
    """Return the key in a request, and whether it is in a cookie. Raises Unauthorized."""
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
    """Raise Forbidden for a change requested by another page in a browser, with the cookie of this one."""
    origin = headers.get("origin")
    if origin is None or _site_of(origin) != headers.get("host"):
        raise Forbidden("a cookie allows changes from pages of this address only; send Authorization: Bearer KEY")
