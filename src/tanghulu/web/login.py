"""The page at /login, by which a person with a browser shows a key or token once; a cookie shows it from then on."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope

from tanghulu.errors import Overloaded, TanghuluError, Unauthorized
from tanghulu.web.bodies import IncomingBody, pieces
from tanghulu.web.errors import answer_to

LOGIN: Final = "/login"
_MAX_FORM_BYTES: Final = 4096
_FORM_S: Final = 10.0
#: Forms that are coming at one time: strangers send them, and each takes a connection while it comes.
_MAX_FORMS: Final = 16
_STYLE: Final = "body{font:16px/1.5 system-ui,sans-serif;max-width:24rem;margin:20vh auto;padding:0 1rem}"
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY: Final = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'self'"
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tanghulu: {what}</title>
<meta name="viewport" content="width=device-width"><style>{style}</style></head><body><h1>A {what} is needed</h1>
<p>{said}</p><form method="post" action="/login"><input type="hidden" name="next" value="{next}">
<label>{label} <input type="password" name="key" autocomplete="current-password" required autofocus></label>
<button>Go on</button></form></body></html>
"""


class LoginPage:
    """The page that asks for ``what`` ("key", "token"), labelled ``label``, and the cookie that keeps it."""

    def __init__(self, what: str, label: str, cookie: str) -> None:
        self._what, self._label, self._cookie = what, label, cookie
        self._num_forms = 0

    def shown(self, headers: Headers) -> str | None:
        """What the request's cookie shows."""
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return None
        return morsel.value if morsel is not None else None

    def refusal(self, scope: Scope, error: TanghuluError) -> Response:
        """The page where a browser wants one, else the error as all errors are answered."""
        wants_page = "text/html" in Headers(scope=scope).get("accept", "")
        if wants_page and scope["method"] == "GET" and type(error) is Unauthorized:
            return self.page(error.message, scope["path"], 401)
        return answer_to(error)

    def page(self, said: str, wanted: str, status: int) -> Response:
        """The page, which leads to ``wanted``."""
        texts = {"what": self._what, "label": self._label, "said": html.escape(said)}
        text = _PAGE.format(style=_STYLE, next=html.escape(_own_path(wanted)), **texts)
        headers = {"content-security-policy": _POLICY, "cache-control": "no-store"}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        return HTMLResponse(text, status, headers)

    async def log_in(self, scope: Scope, receive: Receive, admit: Callable[[str], Awaitable[None]]) -> Response | None:
        """The answer to a GET or POST of /login; None for nobody. ``admit`` raises Unauthorized for a wrong one."""
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
        """The fields of a form; raises BodyTooLarge, BodyTooSlow, Overloaded."""
        if self._num_forms >= _MAX_FORMS:
            raise Overloaded(f"{_MAX_FORMS} people are logging in; try again in a moment")
        self._num_forms += 1
        try:
            body = IncomingBody(scope, receive, _FORM_S, _FORM_S)
            data = b"".join([piece async for piece in pieces(body, _MAX_FORM_BYTES)])
        finally:
            self._num_forms -= 1
        return {name: values[-1] for name, values in parse_qs(data.decode("utf-8", "replace")).items()}


def _own_path(wanted: str) -> str:
    """``wanted`` where it is a path of this server, and no other host's."""
    plain = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if plain else "/dashboard"
