"""Opens blocking connections of the fast lane: over a Unix socket, TCP or TLS."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
from collections.abc import Sequence

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import NodeUnavailable, PeerSilent, Unauthorized
from tanghulu.rpc.sockets import dial_nearby, notice_dead_peer, unpace_within_machine
from tanghulu.runtime.fork import lose_in_children
from tanghulu.types import Address

#: Interval at which the kernel wakes a waiting receive; a deadline is at most this late.
_TICK_S = 0.05
_TICK = struct.pack("ll", 0, int(_TICK_S * 1e6))
#: Buffers in one send are joined up to this size: one record for each would cost more than the copy.
_JOINED_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 5.0
#: A kernel accepts a connection at once, however busy its processes are; after this time its host is unreachable.
REACH_S = 2.0


def dial(
    address: Address | None,
    unix_path: str | None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    *,
    shortcut: bool = False,
    tls: TlsFiles = NO_TLS,
    dead_s: int = 0,
) -> socket.socket | TlsSocket:
    """Return a connected blocking socket, a Unix socket if its path exists here; raises NodeUnavailable.

    Raises PeerSilent if the host does not answer within ``REACH_S``. ``dead_s``: see `notice_dead_peer`; 0 leaves only
    the deadlines of calls to end them.

    ``shortcut``: reach an address of this host by the Unix socket of that name, if there is one. ``tls`` with files
    encrypts TCP; raises Unauthorized for an invalid certificate.
    """
    try:
        if unix_path and os.path.exists(unix_path):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout_s)  # a stalled peer lets its backlog fill up
                sock.connect(unix_path)
                sock.settimeout(None)
            except OSError:
                sock.close()
                raise
        elif address is not None and shortcut and (near := dial_nearby(address)) is not None:
            sock = near
        elif address is not None:
            sock = _reach(address, timeout_s)
            with contextlib.ExitStack() as failed:
                failed.callback(sock.close)
                if dead_s:
                    notice_dead_peer(sock, dead_s)
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                unpace_within_machine(sock, sock.getpeername())
                if tls:
                    return TlsSocket(sock, client_context(tls), address.host, timeout_s, _TICK_S)
                failed.pop_all()
        else:
            raise NodeUnavailable(f"no Unix socket at {unix_path!r} and no TCP address to connect to")
    except ssl.SSLCertVerificationError as error:
        raise Unauthorized(f"the certificate of {address} was refused: {error.verify_message}") from error
    except OSError as error:
        raise NodeUnavailable(f"cannot connect to {unix_path or address}: {error.strerror or error}") from error
    lose_in_children(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
    return sock


def _reach(address: Address, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=min(timeout_s, REACH_S))
    except OSError as error:
        if not is_silence(error) or timeout_s < REACH_S:  # it had too little time
            raise
        raise PeerSilent(f"{address} cannot be reached: {error}") from error


def is_silence(error: OSError) -> bool:
    """Return whether ``error`` means that a host does not answer, rather than a process on it."""
    return isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)


class TlsSocket:
    """A blocking TLS connection with the calls and the time-outs of the plain sockets used by the fast lane.

    ``sock`` is connected; the handshake happens here and raises OSError. ``tick_s``: see FastConnection.

    As with SO_RCVTIMEO, a call that has waited for ``tick_s`` in vain raises BlockingIOError and may be repeated.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float, tick_s: float
    ) -> None:
        sock.settimeout(timeout_s)
        self._sock = context.wrap_socket(sock, server_hostname=host)
        self._sock.settimeout(tick_s)
        lose_in_children(self._sock)

    def send(self, data: bytes | memoryview) -> int:
        """Send some of ``data``; returns the number of bytes."""
        try:
            return self._sock.send(data)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def sendmsg(self, parts: Sequence[bytes | bytearray | memoryview]) -> int:
        """Send some of ``parts``, in order; returns the number of bytes."""
        joined = bytearray()
        for part in parts:
            view = memoryview(part).cast("B")
            joined += view[: _JOINED_BYTES - len(joined)]
            if len(joined) >= _JOINED_BYTES:
                break
        return self.send(memoryview(joined))

    def sendall(self, data: bytes) -> None:
        """Send all of ``data``, blocking as long as necessary."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except TimeoutError:
                continue

    def recv(self, num_bytes: int) -> bytes:
        """Receive at most ``num_bytes``; none if the peer has disconnected."""
        try:
            return self._sock.recv(num_bytes)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except ssl.SSLEOFError:
            return b""

    def recv_into(self, buffer: memoryview) -> int:
        """Receive like ``recv``, into ``buffer``."""
        try:
            return self._sock.recv_into(buffer)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except ssl.SSLEOFError:
            return 0

    def setblocking(self, flag: bool) -> None:
        """Set the blocking mode; without it, a call that would have to wait raises BlockingIOError at once."""
        self._sock.setblocking(flag)

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._sock.fileno()

    def getsockopt(self, level: int, option: int) -> int:
        """Return an option of the socket."""
        return self._sock.getsockopt(level, option)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
