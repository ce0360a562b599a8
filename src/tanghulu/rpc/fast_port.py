"""The one port of a process, where its fast lane listens: over TCP, with TLS if it has a certificate, and locally.

Local peers use a Unix socket (mode 0600) in the run directory, or, if they have only the port, the one of
``sockets``. A connection begins with the preamble; one that begins otherwise, or sends nothing, is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import structlog

from tanghulu.auth.certificate_roles import NONE, roles_of
from tanghulu.auth.handshakes import Handshakes
from tanghulu.auth.places import Strangers, host_of
from tanghulu.auth.tls import ServerTls
from tanghulu.errors import ConfigError
from tanghulu.rpc.fast_server import HELLO_S, FastServerProtocol, FastService, Peer
from tanghulu.rpc.frames import PREAMBLE
from tanghulu.rpc.sockets import listen_nearby, peer_pidfd, peer_process, peer_uid, private_files, unpace_within_machine
from tanghulu.runtime.tasks import accept_no_more, cancelled
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
#: Connections that have not sent their preamble yet.
MAX_UNDECIDED = 256
DESCRIPTORS_PER_CONNECTION = 1


class FastPort:
    """Listens for ``service``. ``start`` opens the port; ``close`` stops listening and ends open connections."""

    def __init__(self, service: FastService, run_dir: Path, name: str, tls: ServerTls | None = None) -> None:
        self.service = service
        self.tls = tls
        self.unix_path = str(run_dir / f"{name}.sock")
        self.rare_log = RareLog(_log)
        self._undecided: Strangers[asyncio.Transport] = Strangers()
        self._handshakes: Handshakes | None = None
        self._servers: list[asyncio.Server] = []
        self._is_closing = False
        self._transports: set[asyncio.Transport] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._refreshing: asyncio.Task[None] | None = None
        self.address = Address("", 0)

    async def start(self, host: str, port: int, advertised_host: str = "") -> Address:
        """Do ``bind`` and ``open`` in one, for processes whose services do not need the address."""
        address = await self.bind(host, port, advertised_host)
        await self.open()
        return address

    async def bind(self, host: str, port: int, advertised_host: str = "", flag: str = "--port") -> Address:
        """Bind host:port (0 picks one) and the Unix socket, without accepting anybody yet.

        Returns the address to publish, with ``advertised_host`` in place of ``host`` if given. Raises ConfigError
        naming ``flag``.
        """
        loop = asyncio.get_running_loop()
        try:
            make: Callable[[], asyncio.Protocol] = partial(_Newcomer, self)
            if self.tls is not None:
                make = self._handshakes = Handshakes(self.tls.context, make, HELLO_S)
            tcp = await loop.create_server(make, host, port, start_serving=False)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error.strerror  # asyncio repeats the address
            raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another {flag}") from error
        self._servers.append(tcp)
        try:
            with private_files():
                unix = await loop.create_unix_server(lambda: _Newcomer(self), self.unix_path, start_serving=False)
        except OSError as error:
            tcp.close()
            raise ConfigError(f"cannot listen on {self.unix_path}: {error}; choose a shorter --run-dir") from error
        self._servers.append(unix)
        shortcut = listen_nearby(host, tcp.sockets[0].getsockname()[1])
        if shortcut is not None:
            self._servers.append(
                await loop.create_unix_server(lambda: _Newcomer(self), sock=shortcut, start_serving=False)
            )
        self.address = Address(advertised_host or host, tcp.sockets[0].getsockname()[1])
        return self.address

    async def open(self) -> None:
        """Accept peers: the service is complete now."""
        for server in self._servers:
            await server.start_serving()
        if self.tls is not None:
            self._refreshing = asyncio.create_task(self.tls.follow())

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening, close every connection within ``grace_s``, remove the socket file."""
        self._is_closing = True
        await accept_no_more(self._servers)
        for server in self._servers:
            server.close()
        if self._refreshing is not None:
            await cancelled(self._refreshing)
        if self._handshakes is not None:
            self._handshakes.close()
        for transport in list(self._transports):
            transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), grace_s)
        for transport in list(self._transports):  # of peers that do not read their last answers
            transport.abort()
        await asyncio.sleep(0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.unix_path)

    def enter(self, transport: asyncio.Transport) -> None:
        """Count a new connection; if too many have sent no preamble, the oldest of those is closed.

        A connection accepted by the kernel before the port was closed is cut.
        """
        self._transports.add(transport)
        self._empty.clear()
        if self._is_closing:
            transport.abort()
            return
        self._undecided.enter(transport, host_of(transport))
        oldest = self._undecided.make_way(MAX_UNDECIDED)
        if oldest is not None:
            oldest.abort()

    def decided(self, transport: asyncio.Transport) -> None:
        """Count a connection that has sent its first bytes."""
        self._undecided.leave(transport)

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget an ended connection."""
        self._transports.discard(transport)
        self._undecided.leave(transport)
        if not self._transports:
            self._empty.set()

    def roles(self, transport: asyncio.Transport) -> frozenset[str]:
        """Return the roles in the certificate of a peer; empty without a certificate."""
        certificate = transport.get_extra_info("peercert")
        if not certificate or self.tls is None:
            return frozenset()
        return frozenset(roles_of(certificate)) or frozenset([NONE] * self.tls.names_roles)


class _Newcomer(asyncio.Protocol):
    """A connection before its preamble; then the fast lane's protocol takes over."""

    def __init__(self, port: FastPort) -> None:
        self._port = port
        self._first = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop has its own, which is not a subclass
        self._port.enter(transport)
        if self._port.tls is not None and not _may_come_plain(transport):
            transport.abort()
        self._timer = asyncio.get_running_loop().call_later(HELLO_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._port.leave(self._transport)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        self._first += data
        if len(self._first) < len(PREAMBLE) or transport.is_closing():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._port.decided(transport)
        if self._first.startswith(PREAMBLE):
            self._pass_on(transport)
        else:
            self._port.rare_log.warning("fast_port.unknown_protocol", first_bytes=self._first[:16].hex())
            transport.close()

    def _pass_on(self, transport: asyncio.Transport) -> None:
        """Pass the connection, and the data after the preamble, to the fast lane's protocol."""
        peer = _peer(transport)
        peer.roles = self._port.roles(transport)
        peer.on_close.append(lambda: self._port.leave(transport))
        target = FastServerProtocol(self._port.service, peer)
        transport.set_protocol(target)
        target.connection_made(transport)
        if len(self._first) > len(PREAMBLE):
            target.data_received(self._first[len(PREAMBLE) :])


def _may_come_plain(transport: asyncio.Transport) -> bool:
    """Return whether an unencrypted connection comes from this user or root, and so from this host."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return transport.get_extra_info("sslcontext") is not None
    return peer_uid(sock) in (os.geteuid(), 0)


def _peer(transport: asyncio.Transport) -> Peer:
    sock, name = transport.get_extra_info("socket"), transport.get_extra_info("peername")
    if sock is not None and sock.family == socket.AF_UNIX:
        pid = peer_process(sock)
        return Peer(pid=pid, is_unix=True, name=f"pid {pid}", pidfd=partial(peer_pidfd, sock))
    if sock is not None and name:
        unpace_within_machine(sock, name)
    return Peer(pid=None, is_unix=False, name=str(name))
