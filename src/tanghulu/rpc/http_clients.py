"""HTTP clients of other servers: connections without proxies, whose only deadlines are those of dead hosts."""

from __future__ import annotations

from typing import Final

import httpx

from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.rpc.sockets import SILENT_HOST_S, dead_peer_options

CONNECT_TIMEOUT_S: Final = 2.0


def new_client(tls: TlsFiles, num_kept: int, kept_s: float | None = None) -> httpx.AsyncClient:
    """Return a client for answers of any length: only connecting and silent hosts have deadlines.

    ``num_kept`` unused connections are kept, for ``kept_s``; ``tls`` is for https.
    """
    transport = httpx.AsyncHTTPTransport(
        verify=client_context(tls),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=num_kept, keepalive_expiry=kept_s),
        trust_env=False,
        socket_options=dead_peer_options(SILENT_HOST_S),
    )
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(timeout=timeout, transport=transport, trust_env=False)


def reason(error: Exception) -> str:
    """Return the text of ``error``, which httpx often leaves empty."""
    return str(error) or type(error).__name__
