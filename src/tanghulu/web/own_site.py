"""Refuses what pages of other sites have a browser ask for, so that no web page reaches a port behind its user's back.

Browsers say where a request comes from: ``Origin``, and ``Sec-Fetch-Site``. A page that was fetched from a name which
now leads to this machine (DNS rebinding) is of the same origin, but its name stands in ``Host``: so a port on loopback
answers to addresses, to names without a dot, which no stranger owns, and to names that it was given. Programs send no
Origin; a link to a page of ours is followed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tanghulu.errors import Forbidden
from tanghulu.types import is_loopback
from tanghulu.web.errors import answer_to, log_failure


def listed(text: str) -> tuple[str, ...]:
    """The values of an option, separated by commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


class OwnSite:
    """``app``, which listens on ``host``, for programs, its own pages, and pages of ``origins`` ("*": of all).

    Where only this machine reaches ``host``, requests are for an address, a name without a dot, or one of ``names``.
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
                f"{name[:128]!r} is no name of this port, which only this machine reaches; use localhost, or list the "
                "name in --allowed-hosts"
            )
        if origin is not None:
            foreign = urlsplit(origin).netloc != host and not {origin, "*"} & self._origins
        else:  # a link that a person follows names no origin
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            foreign = headers.get("sec-fetch-site") == "cross-site" and not is_link and "*" not in self._origins
        if foreign:
            raise Forbidden(f"pages of {(origin or 'other sites')[:128]} may not use this port (--cors-origins)")


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and not port.endswith("]") else host).lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
