"""A blocking TLS connection with the calls and the time-outs of the plain sockets that the fast lane uses."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from tanghulu.runtime.fork import lose_in_children

#: Buffers in one send are joined up to this size: a record each would cost more than the copy.
_JOINED_BYTES = 64 << 10


class TlsSocket:
    """``sock`` is connected; the handshake happens here and raises OSError. ``tick_s``: see FastConnection.

    As with SO_RCVTIMEO, a call that waited for ``tick_s`` in vain raises BlockingIOError and may be made again.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float, tick_s: float
    ) -> None:
        sock.settimeout(timeout_s)
        self._sock = context.wrap_socket(sock, server_hostname=host)
        self._sock.settimeout(tick_s)
        lose_in_children(self._sock)

    def send(self, data: bytes | memoryview) -> int:
        """Some of ``data``."""
        try:
            return self._sock.send(data)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def sendmsg(self, parts: Sequence[bytes | bytearray | memoryview]) -> int:
        """Some of ``parts``, one behind the other."""
        joined = bytearray()
        for part in parts:
            view = memoryview(part).cast("B")
            joined += view[: _JOINED_BYTES - len(joined)]
            if len(joined) >= _JOINED_BYTES:
                break
        return self.send(memoryview(joined))

    def sendall(self, data: bytes) -> None:
        """All of it, as long as that takes."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except TimeoutError:
                continue

    def recv(self, num_bytes: int) -> bytes:
        """At most so many bytes; none when the peer has hung up."""
        try:
            return self._sock.recv(num_bytes)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except ssl.SSLEOFError:
            return b""

    def recv_into(self, buffer: memoryview) -> int:
        """As ``recv``, into ``buffer``."""
        try:
            return self._sock.recv_into(buffer)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except ssl.SSLEOFError:
            return 0

    def setblocking(self, flag: bool) -> None:
        """False: a call that would have to wait raises BlockingIOError at once."""
        self._sock.setblocking(flag)

    def fileno(self) -> int:
        """The descriptor, to be polled."""
        return self._sock.fileno()

    def getsockopt(self, level: int, option: int) -> int:
        """As a socket's."""
        return self._sock.getsockopt(level, option)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
