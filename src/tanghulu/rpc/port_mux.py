"""One port, two protocols: a connection's first bytes tell which one it speaks.

The fast lane's preamble goes to the FastService in this process; an HTTP/2 preface ("PRI * HTTP/2.0") is
relayed to the process's gRPC server, which listens on a Unix socket of its own. So every process
has one address to publish, and TLS ends in one place for both. The relay costs gRPC one hop over a
Unix socket; gRPC carries control only. The same fast lane listens on a Unix socket (mode 0600) for local peers, and on
one that those find who know nothing but the port (``nearby``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import structlog

from tanghulu.auth.certificate_roles import NONE, relay_name, roles_of
from tanghulu.auth.handshakes import Handshakes
from tanghulu.auth.places import CONNECTIONS_ONE_IN, Caller, Places, Strangers, host_of
from tanghulu.auth.tls import ServerTls
from tanghulu.errors import ConfigError
from tanghulu.rpc import nearby
from tanghulu.rpc.authorizer import GrpcAuthorizer
from tanghulu.rpc.fast_server import HELLO_S, FastServerProtocol, FastService, Peer
from tanghulu.rpc.frames import PREAMBLE
from tanghulu.rpc.grpc_edge import guarded_server
from tanghulu.rpc.pacing import notice_dead_peer, unpace_within_machine
from tanghulu.rpc.peer_process import peer_pidfd, peer_process, peer_uid
from tanghulu.runtime.accepting import accept_no_more
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
_HTTP2 = b"PRI * HT"
#: Connections that have not sent their first bytes yet, and gRPC calls under way, followers' streams included.
MAX_UNDECIDED = 256
MAX_GRPC_CALLS = 16384
#: gRPC connections on which no call has been let through yet, and how long they may stay.
MAX_UNKNOWN_RELAYS = 256
UNKNOWN_RELAY_S = 30.0
#: One of the fast lane; of gRPC one outside, and both ends of the one that it is relayed through.
DESCRIPTORS_PER_CONNECTION = 4
#: How often the files of TLS are looked at.
_CERTIFICATES_S = 30.0


class PortMux:
    """Listens at a process's one port. ``start`` opens it; ``close`` stops listening and ends what is open."""

    def __init__(
        self,
        service: FastService,
        run_dir: Path,
        name: str,
        authorizer: GrpcAuthorizer | None = None,
        tls: ServerTls | None = None,
        max_grpc_calls: int = MAX_GRPC_CALLS,
    ) -> None:
        self.service = service
        self.tls = tls
        self.unix_path = str(run_dir / f"{name}.sock")
        self._grpc_path = str(run_dir / f"{name}.grpc")
        self.grpc_server = guarded_server(max_grpc_calls, authorizer, on_call=self._known)
        self.rare_log = RareLog(_log)
        self._undecided: Strangers[asyncio.Transport] = Strangers()
        self._handshakes: Handshakes | None = None
        self._unknown_relays: Strangers[_Sniffer] = Strangers()
        self._relays: dict[str, _Sniffer] = {}
        self._relay_places = Places("gRPC connections", CONNECTIONS_ONE_IN)
        self._servers: list[asyncio.Server] = []
        self._is_closing = False
        self._transports: set[asyncio.Transport] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._refreshing: asyncio.Task[None] | None = None
        self.address = Address("", 0)

    async def start(self, host: str, port: int, advertised_host: str = "") -> Address:
        """``bind`` and ``open`` in one; for processes whose services do not need to know the address."""
        address = await self.bind(host, port, advertised_host)
        await self.open()
        return address

    async def bind(self, host: str, port: int, advertised_host: str = "", flag: str = "--port") -> Address:
        """Take host:port (0 picks one) and the Unix socket, without letting anybody in yet.

        Returns the address to publish, with ``advertised_host`` in place of ``host`` if given. Raises ConfigError that
        names ``flag``.
        """
        loop = asyncio.get_running_loop()
        try:
            make: Callable[[], asyncio.Protocol] = partial(_Sniffer, self)
            if self.tls is not None:
                make = self._handshakes = Handshakes(self.tls.context, make, HELLO_S)
            tcp = await loop.create_server(make, host, port, start_serving=False)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error.strerror  # asyncio says the address once more
            raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another {flag}") from error
        self._servers.append(tcp)
        try:
            with _private_files():
                unix = await loop.create_unix_server(lambda: _Sniffer(self), self.unix_path, start_serving=False)
        except OSError as error:
            tcp.close()
            raise ConfigError(f"cannot listen on {self.unix_path}: {error}; choose a shorter --run-dir") from error
        self._servers.append(unix)
        shortcut = nearby.listener(host, tcp.sockets[0].getsockname()[1])
        if shortcut is not None:
            self._servers.append(
                await loop.create_unix_server(lambda: _Sniffer(self), sock=shortcut, start_serving=False)
            )
        self.address = Address(advertised_host or host, tcp.sockets[0].getsockname()[1])
        return self.address

    async def open(self) -> None:
        """Start the gRPC server (its services are complete now) and let peers in."""
        with _private_files():
            self.grpc_server.add_insecure_port(f"unix:{self._grpc_path}")
            await self.grpc_server.start()
        for server in self._servers:
            await server.start_serving()
        if self.tls is not None:
            self._refreshing = asyncio.create_task(_follow_files(self.tls))

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening, end gRPC calls after ``grace_s``, close every connection, remove the socket files."""
        self._is_closing = True
        await accept_no_more(self._servers)
        for server in self._servers:
            server.close()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self.grpc_server.stop(grace_s)
        if self._handshakes is not None:
            self._handshakes.close()
        for transport in list(self._transports):
            transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), grace_s)
        for transport in list(self._transports):  # of peers that do not read what is left for them
            transport.abort()
        await asyncio.sleep(0)
        for path in (self.unix_path, self._grpc_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    @property
    def num_handshakes(self) -> int:
        """Connections whose TLS handshake has not ended."""
        return 0 if self._handshakes is None else len(self._handshakes)

    def enter(self, transport: asyncio.Transport) -> None:
        """Count a new connection; if too many have not said what they want, the oldest of those is closed.

        A connection that the kernel had accepted before the mux was closed is cut.
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
        """Count a connection that has said what it wants."""
        self._undecided.leave(transport)

    def begin_relay(self, relay: _Sniffer, host: str) -> None:
        """Enter a connection to gRPC from ``host``, of a stranger until it has made a call; one may make way for it."""
        self._unknown_relays.enter(relay, host)
        oldest = self._unknown_relays.make_way(MAX_UNKNOWN_RELAYS)
        if oldest is not None:
            self.rare_log.warning("port_mux.too_many_unknown_grpc_connections", most=MAX_UNKNOWN_RELAYS)
            oldest.turn_out()

    def _known(self, peer: str, caller: Caller) -> None:
        """Give the relay behind ``peer`` its place: ``caller`` has made a call there. Raises Overloaded."""
        relay = self._relays.get(peer)
        if relay is not None and relay in self._unknown_relays:
            self._relay_places.take(caller, self.service.max_connections)
            self._unknown_relays.leave(relay)
            relay.known(caller)

    def end_relay(self, relay: _Sniffer, name: str, caller: Caller | None) -> None:
        """Forget a gRPC connection that has ended; ``caller`` had its place."""
        self._unknown_relays.leave(relay)
        self._relays.pop(name, None)
        if caller is not None:
            self._relay_places.give_back(caller)

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection that has ended."""
        self._transports.discard(transport)
        self._undecided.leave(transport)
        if not self._transports:
            self._empty.set()

    def roles(self, transport: asyncio.Transport) -> frozenset[str]:
        """The roles in the certificate of a peer; none if it has shown no certificate."""
        certificate = transport.get_extra_info("peercert")
        if not certificate or self.tls is None:
            return frozenset()
        return frozenset(roles_of(certificate)) or frozenset([NONE] * self.tls.names_roles)

    async def relay_target(self, relay: _Sniffer, front: asyncio.Transport) -> tuple[asyncio.Transport, str]:
        """A connection to the gRPC server whose answers go to ``front``, and its name there. Raises OSError."""
        loop, sock = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            roles = self.roles(front)
            sock.bind(relay_name(roles) if roles else "")  # "": the kernel chooses; the server gets it with each call
            name = f"unix-abstract:{sock.getsockname()[1:].decode()}"
            self._relays[name] = relay
            await loop.sock_connect(sock, self._grpc_path)
            back, _ = await loop.create_unix_connection(lambda: _Relay(front), sock=sock)
        except BaseException:  # a cancel, too: nobody else knows the socket; it is raised on
            sock.close()
            raise
        return back, name


async def _follow_files(tls: ServerTls) -> None:
    """Use replaced certificates for new connections; until cancelled."""
    while True:
        await asyncio.sleep(_CERTIFICATES_S)
        try:
            if tls.refresh():
                _log.info("port_mux.certificates_replaced")
        except ConfigError as error:
            _log.error("port_mux.certificates_not_replaced", error=error.message)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Socket files made inside are for this user only."""
    previous = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(previous)


class _Relay(asyncio.Protocol):
    """Copies what arrives here to ``other``, with back-pressure."""

    def __init__(self, other: asyncio.Transport) -> None:
        self._other = other
        self._own: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._own = cast(asyncio.Transport, transport)  # uvloop has its own, which is no subclass

    def data_received(self, data: bytes) -> None:
        if not self._other.is_closing():
            self._other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._other.close()

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()


class _Sniffer(asyncio.Protocol):
    """Decides by the first eight bytes who takes the connection, then passes everything on to it."""

    def __init__(self, mux: PortMux) -> None:
        self._mux = mux
        self._first = b""
        self._target: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._relay_name: str | None = None  # "" until there is one
        self._caller: Caller | None = None  # of gRPC, once it has made a call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop has its own, which is no subclass
        self._mux.enter(transport)
        if self._mux.tls is not None and not _may_come_plain(transport):
            transport.abort()
        self._timer = asyncio.get_running_loop().call_later(HELLO_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._mux.leave(self._transport)
        if self._relay_name is not None:
            self._mux.end_relay(self, self._relay_name, self._caller)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._target is not None:
            self._target.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._target is not None:
            self._target.data_received(data)
            return
        self._first += data
        if self._task is None and len(self._first) >= len(PREAMBLE):
            self._decide()

    def pause_writing(self) -> None:
        if self._target is not None:
            self._target.pause_writing()

    def resume_writing(self) -> None:
        if self._target is not None:
            self._target.resume_writing()

    def _decide(self) -> None:
        assert self._transport is not None
        if self._timer is not None:
            self._timer.cancel()
        self._mux.decided(self._transport)
        if self._first.startswith(PREAMBLE):
            self._pass_on(self._transport)
        elif self._first.startswith(_HTTP2):
            self._relay_name = ""
            self._timer = asyncio.get_running_loop().call_later(UNKNOWN_RELAY_S, self._transport.close)
            self._mux.begin_relay(self, host_of(self._transport))
            notice_dead_peer(self._transport.get_extra_info("socket"))
            self._transport.pause_reading()
            self._task = asyncio.ensure_future(self._connect_grpc(self._transport))
        else:
            self._mux.rare_log.warning("port_mux.unknown_protocol", first_bytes=self._first[:16].hex())
            self._transport.close()

    def known(self, caller: Caller) -> None:
        """The connection is ``caller``'s from now on."""
        self._caller = caller
        if self._timer is not None:
            self._timer.cancel()

    def turn_out(self) -> None:
        """Make way for another stranger."""
        assert self._transport is not None
        self._transport.abort()

    def _pass_on(self, transport: asyncio.Transport) -> None:
        """From now on the fast lane's protocol hears of the connection itself."""
        peer = _peer(transport)
        peer.roles = self._mux.roles(transport)
        peer.on_close.append(lambda: self._mux.leave(transport))
        target = FastServerProtocol(self._mux.service, peer)
        transport.set_protocol(target)
        target.connection_made(transport)
        if len(self._first) > len(PREAMBLE):
            target.data_received(self._first[len(PREAMBLE) :])

    async def _connect_grpc(self, transport: asyncio.Transport) -> None:
        try:
            back, self._relay_name = await self._mux.relay_target(self, transport)
        except OSError as error:
            self._mux.rare_log.warning("port_mux.grpc_unreachable", error=str(error))
            transport.close()
            return
        self._target = _Relay(back)
        self._target.connection_made(transport)
        back.write(self._first)
        if not transport.is_closing():
            transport.resume_reading()


def _may_come_plain(transport: asyncio.Transport) -> bool:
    """Whether a connection that is not encrypted comes from this user or root, and so from this host."""
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
