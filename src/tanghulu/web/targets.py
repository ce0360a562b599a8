"""The target of a request: a path whose end may be any text, and a query of which every option is known.

Starlette decodes both leniently: bytes that are no UTF-8 become U+FFFD, and so another name. These functions refuse.
"""

from __future__ import annotations

from collections import Counter
from urllib.parse import unquote_to_bytes

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor

from tanghulu.errors import InvalidRequest


class _RestConvertor(Convertor[str]):
    """Matches the whole rest of a path; Starlette's own ``path`` ends at a line's end."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """The text, as it is in the path."""
        return value

    def to_string(self, value: str) -> str:
        """The path of a text."""
        return value


register_url_convertor("rest", _RestConvertor())


def rest(name: str) -> str:
    """The end of a route's path that takes all that is left as the parameter ``name``."""
    return f"{{{name}:rest}}"


def check_path(request: Request) -> None:
    """Raise InvalidRequest if the path is not UTF-8: other characters would stand in it instead."""
    _decoded(request.scope["raw_path"], "path")


async def checked_target(request: Request) -> None:
    """Raise InvalidRequest for a path or query that is not UTF-8, and an option that is unknown here or comes twice.

    A dependency of FastAPI's routes.
    """
    check_path(request)
    _decoded(request.scope["query_string"], "query")
    route = request.scope.get("route")
    known = {each.alias for each in route.dependant.query_params} if isinstance(route, APIRoute) else set()
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            there = f"there is {', '.join(sorted(known))}" if known else "this route has none"
            raise InvalidRequest(f"the option {name[:80]!r} of the query is unknown; {there}")
        if count > 1:
            raise InvalidRequest(f"the option {name!r} stands {count} times in the query")


def _decoded(text: bytes, what: str) -> None:
    try:
        unquote_to_bytes(text).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the {what} is not percent-encoded UTF-8: {error}") from None
