"""Opens blocking connections of the fast lane: by a Unix socket, by TCP, or by TLS."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
from collections.abc import Sequence

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import NodeUnavailable, PeerSilent, Unauthorized
from tanghulu.rpc.pacing import notice_dead_peer, unpace_within_machine
from tanghulu.rpc.unix_sockets import dial_nearby
from tanghulu.runtime.fork import lose_in_children
from tanghulu.types import Address

#: The kernel wakes a waiting receive this often, so that a deadline is at most this late.
_TICK_S = 0.05
_TICK = struct.pack("ll", 0, int(_TICK_S * 1e6))
#: Buffers in one send are joined up to this size: a record each would cost more than the copy.
_JOINED_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 5.0
#: A kernel lets a connection in at once, however busy its processes are; one that does not for so long is out of reach.
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
    """A connected blocking socket, by the Unix socket if its path exists here; raises NodeUnavailable.

    PeerSilent if the host does not answer within ``REACH_S``. ``dead_s``: see `notice_dead_peer`; 0: nothing but the
    deadlines of calls ends them.

    ``shortcut``: to an address of this host, come by its Unix socket of that name if there is one. ``tls`` with files:
    TCP is encrypted; raises Unauthorized if a certificate is not what it should be.
    """
    try:
        if unix_path and os.path.exists(unix_path):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout_s)  # a peer that stands still lets its backlog fill up
                sock.connect(unix_path)
                sock.settimeout(None)
            except OSError:
                sock.close()
                raise
        elif address is not None and shortcut and (near := dial_nearby(address)) is not None:
            sock = near
        elif address is not None:
            sock = _reach(address, timeout_s)
            if dead_s:
                notice_dead_peer(sock, dead_s)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unpace_within_machine(sock, sock.getpeername())
            if tls:
                return TlsSocket(sock, client_context(tls), address.host, timeout_s, _TICK_S)
        else:
            raise NodeUnavailable(f"no Unix socket at {unix_path!r} and no TCP address to connect to")
    except ssl.SSLCertVerificationError as error:
        raise Unauthorized(f"{address} has a certificate for another name or role: {error.verify_message}") from error
    except OSError as error:
        raise NodeUnavailable(f"cannot connect to {unix_path or address}: {error}") from error
    lose_in_children(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
    return sock


def _reach(address: Address, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=min(timeout_s, REACH_S))
    except OSError as error:
        if not is_silence(error) or timeout_s < REACH_S:  # it had no time
            raise
        raise PeerSilent(f"{address} cannot be reached: {error}") from error


def is_silence(error: OSError) -> bool:
    """Return whether ``error`` says that a host does not answer, rather than a process on it."""
    return isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)


class TlsSocket:
    """A blocking TLS connection with the calls and the time-outs of the plain sockets that the fast lane uses.

    ``sock`` is connected; the handshake happens here and raises OSError. ``tick_s``: see FastConnection.

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
