"""The machine's TCP connections, plain or encrypted by TLS with the calls and exceptions of the plain ones.

A record that the kernel does not take whole is kept by OpenSSL, which must then be given the same bytes again: streams
do so, since they keep unsent bytes. ``recv_into`` continues until there is no further record, so no decrypted bytes
wait where a poller cannot see them.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.sockets import SILENT_HOST_S, notice_dead_peer, unpace_within_machine
from tanghulu.runtime.fork import lose_in_children
from tanghulu.transfer_engine.core.network import Poller, StreamSocket
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.types import Address

_TIMEVAL = struct.Struct("ll")
#: Wait of a non-waiting call for the peer's part of the handshake; it would be called again at once otherwise, since
#: the socket is always writable.
_HANDSHAKE_PAUSE_MS = 1


class KernelNetwork:
    """The machine's own network; ``tls`` with files verifies peers, and encrypts."""

    def __init__(self, tls: TlsFiles = NO_TLS) -> None:
        self._tls = tls

    def connect(self, path: Path, address: Address) -> StreamSocket:
        """Return a socket that has begun to connect, bound to the path's local device if it names one."""
        return connect(path.label, address, self._tls, path.local_device)

    def poller(self) -> Poller:
        """Return an epoll descriptor."""
        return select.epoll()


def connect(label: str, address: Address, tls: TlsFiles = NO_TLS, device: str = "") -> StreamSocket:
    """Return a socket without Nagle's delay that has begun to connect.

    Raises NodeUnavailable, beginning with ``label``, and ConfigError for bad files of TLS.
    """
    context = client_context(tls) if tls else None
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = found[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except OSError as error:
        raise NodeUnavailable(f"{label}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if device:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        refusal = sock.connect_ex(target)
        if refusal not in (0, errno.EINPROGRESS):
            raise OSError(refusal, errno.errorcode.get(refusal, "unknown error"))
        unpace_within_machine(sock, target)
        notice_dead_peer(sock, SILENT_HOST_S)
        lose_in_children(sock)
    except OSError as error:
        sock.close()
        raise NodeUnavailable(f"{label}: {error.strerror or error}") from error
    return sock if context is None else TlsStreamSocket(sock, context, address.host)


class TlsStreamSocket:
    """``sock`` has begun to connect. Calls made meanwhile advance the handshake."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._plain: socket.socket | None = sock
        self._context = context
        self._host = host
        self._tls: ssl.SSLSocket | None = None
        self._greeted = False
        self._fd = sock.fileno()
        self._timeout_s = 0.0

    # --- StreamSocket

    def setblocking(self, flag: bool, /) -> None:
        """Do nothing: the descriptor never blocks; calls that wait use poll."""

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """Bound the wait of the socket's calls."""
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO), "nothing else is asked of a stream's socket"
        seconds, microseconds = _TIMEVAL.unpack(value)
        self._timeout_s = seconds + microseconds / 1e6

    def sendmsg(self, buffers: Iterable[memoryview | bytes], ancillary: tuple[()], flags: int, /) -> int:
        """Encrypt and send what the kernel takes."""
        tls = self._ready()
        sent = 0
        try:
            for each in buffers:
                view = memoryview(each)
                while view:
                    num_bytes = tls.send(view)
                    sent += num_bytes
                    view = view[num_bytes:]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            if not sent:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        return sent

    def send(self, data: bytes, flags: int, /) -> int:
        """Send one buffer."""
        return self.sendmsg((data,), (), flags)

    def recv_into(self, buffer: memoryview, num_bytes: int, flags: int, /) -> int:
        """Receive available bytes; without MSG_DONTWAIT wait for them, with MSG_WAITALL for all of them."""
        view = buffer[:num_bytes] if num_bytes else buffer
        if flags & socket.MSG_DONTWAIT:
            return self._take(view)
        until_s = time.monotonic() + self._timeout_s
        taken = 0
        while True:
            try:
                now = self._take(view[taken:])
                taken += now
                if not now or taken == len(view) or not flags & socket.MSG_WAITALL:
                    return taken
            except BlockingIOError:
                left_s = until_s - time.monotonic()
                if left_s > 0:
                    self._wait(select.POLLIN, left_s)
                elif taken:
                    return taken
                else:
                    raise

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancillary_bytes: int, flags: int, /
    ) -> tuple[int, list[Any], int, Any]:
        """Receive bytes; fill the first buffer, then the next, as far as they go."""
        total = 0
        for number, each in enumerate(buffers):
            try:
                taken = self.recv_into(each, 0, socket.MSG_DONTWAIT if number else flags)
            except BlockingIOError:
                if not total:
                    raise
                break
            total += taken
            if taken < len(each):
                break
        return total, [], 0, None

    def fileno(self) -> int:
        """Return the descriptor of the connection; it does not change."""
        return self._fd

    def close(self) -> None:
        """Close the connection."""
        for each in (self._plain, self._tls):
            if each is not None:
                each.close()

    # --- inside

    def _take(self, view: memoryview) -> int:
        tls = self._ready()
        taken = 0
        try:
            while taken < len(view):
                num_bytes = tls.recv_into(view[taken:])
                if not num_bytes:
                    break
                taken += num_bytes
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not taken:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        except ssl.SSLEOFError:
            return taken
        return taken

    def _ready(self) -> ssl.SSLSocket:
        """Return the connection after its handshake; raises BlockingIOError until that has ended."""
        tls = self._tls or self._begin()
        if not self._greeted:
            try:
                tls.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._wait(select.POLLIN, _HANDSHAKE_PAUSE_MS / 1000)
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            self._greeted = True
        return tls

    def _begin(self) -> ssl.SSLSocket:
        plain = self._plain
        assert plain is not None, "wrapped once"
        failure = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        plain.getpeername()  # ENOTCONN while it is still connecting
        self._tls = self._context.wrap_socket(plain, server_hostname=self._host, do_handshake_on_connect=False)
        lose_in_children(self._tls)
        self._plain = None
        return self._tls

    def _wait(self, events: int, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._fd, events)
        poller.poll(max(timeout_s * 1000, 0))
