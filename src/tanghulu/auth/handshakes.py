"""TLS handshakes at one listener: each has a deadline, and their number is bounded.

A connection that begins a handshake without finishing it costs its peer nothing and this process an OpenSSL context.
So at most ``MAX_HANDSHAKES`` are in progress; a new one beyond that evicts the oldest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

_log = structlog.get_logger(__name__)

#: Unfinished handshakes at one listener.
MAX_HANDSHAKES: Final = 256


class Handshakes:
    """A protocol factory for a listener: ``make()`` gets each connection after a handshake within ``timeout_s``."""

    def __init__(self, context: ssl.SSLContext, make: Callable[[], asyncio.BaseProtocol], timeout_s: float) -> None:
        self._context = context
        self._make = make
        self._timeout_s = timeout_s
        self._under_way: dict[socket.socket, asyncio.Task[None]] = {}

    def __call__(self) -> asyncio.Protocol:
        """Accept a new connection."""
        return _Arrival(self)

    def begin(self, sock: socket.socket) -> None:
        """Start the handshake of a connection; the oldest one is closed if there are too many."""
        self._under_way[sock] = asyncio.ensure_future(self._shake(sock))
        if len(self._under_way) > MAX_HANDSHAKES:
            oldest = next(iter(self._under_way))
            del self._under_way[oldest]
            _hang_up(oldest)

    def close(self) -> None:
        """Close all unfinished handshakes."""
        for sock in self._under_way:
            _hang_up(sock)

    async def _shake(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, sock, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:  # it hung up, was evicted, timed out, or speaks another protocol
            _log.debug("handshakes.failed", error=str(error))
            sock.close()
        finally:
            self._under_way.pop(sock, None)


class _Arrival(asyncio.Protocol):
    """Takes the socket from the listener before anything is read from it."""

    def __init__(self, owner: Handshakes) -> None:
        self._owner = owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as error:  # no descriptor is left
            _log.debug("handshakes.failed", error=str(error))
            return
        finally:
            transport.close()  # the connection lives on in its other descriptor
        sock.setblocking(False)
        self._owner.begin(sock)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_RDWR)
