"""What both routers share that pass a request on: the client, whom to try next, which headers go through."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context

CONNECT_TIMEOUT_S = 2.0
#: A server that answers with one of these has not begun: the request may go to another.
TRY_ELSEWHERE = (429, 502, 503)
#: Headers of one hop, which the next one makes itself.
_OF_ONE_HOP = frozenset(("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
_OF_REQUESTS = _OF_ONE_HOP | {"accept-encoding", "content-length", "host"}


def new_client(tls: TlsFiles = NO_TLS) -> httpx.AsyncClient:
    """A client for answers of any length, with as many connections as there are requests; ``tls`` for https."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=client_context(tls))


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client's request that go on to the server."""
    return {name: value for name, value in headers.items() if name.lower() not in _OF_REQUESTS}


def answer_headers(response: httpx.Response) -> dict[str, str]:
    """The headers of a server's answer that go back to the client."""
    return {name: value for name, value in response.headers.items() if name.lower() not in _OF_ONE_HOP}


def reason(error: Exception) -> str:
    """The text of ``error``, for which httpx often has none."""
    return str(error) or type(error).__name__
