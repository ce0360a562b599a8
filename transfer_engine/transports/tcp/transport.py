"""The tcp transport: several non-blocking streams to one peer, received straight into the destination.

Owns sockets and their bytes, decides nothing. A stream pipelines heads of many slices, and the peer answers them in
order.

No late duplicate of a failed WRITE: a stream that failed is closed and a retry goes over another connection. Its bytes
may still sit in the peer's socket, so every stream to that peer sends a FENCE with the closed connection's token before
its next slice (see ``fences``): the peer cuts that connection, or refuses it if it arrives later, before it reads
anything behind the fence. The same holds for bytes left by a batch that ended by deadline or cancellation, as far as
this process's later slices go; everybody else is guarded by the lease: the owner admits no slice after the lease's end,
and does not free the range while an admitted one is open. A READ lands nothing after ``cut``: the socket is closed in
this process.
"""

from __future__ import annotations

import functools
import os
import select
import socket
from collections.abc import Sequence

from tanghulu.transfer_engine.core.config import MIB, EngineConfig, TransportLimits
from tanghulu.transfer_engine.core.links import WiredLink
from tanghulu.transfer_engine.core.network import Network
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.segment import Endpoint, SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.slices import Opcode, Slice
from tanghulu.transfer_engine.core.transport import (
    Ability,
    Completion,
    ConnectContext,
    ConnectionBroken,
    Fences,
    ServeContext,
)
from tanghulu.transfer_engine.topology.devices import Topology, pair
from tanghulu.transfer_engine.transports.tcp.listener import TcpListener
from tanghulu.transfer_engine.transports.tcp.sockets import KernelNetwork
from tanghulu.transfer_engine.transports.tcp.stream import TcpStream
from tanghulu.types import Address

NAME = "tcp"
LIMITS = TransportLimits(slice_bytes=1 * MIB, window_bytes=8 * MIB, window_slices=64)


def connect(context: ConnectContext, network: Network | None = None) -> TcpPeer:
    """Return a remote segment behind some ``host:port``; nothing is sent yet. ``network`` replaces the machine's."""
    if network is None:
        network = KernelNetwork(context.config.tls)
    return TcpPeer(context, network)


def serve(context: ServeContext) -> TcpListener:
    """Return a port at which peers read and write, with TLS if the options require it."""
    return TcpListener(context)


def probe(topology: Topology) -> Ability:
    """Return whether connections can be bound to the devices of ``topology``."""
    names = [each.name for each in topology.usable]
    if not names:
        return Ability(True, "over the loopback only: no other device is up and has an address")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        for name in names:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            except OSError as error:
                why = os.strerror(error.errno or 0)
                return Ability(
                    True, f"by the kernel's routes; --topology cannot spread it, {name} cannot be used: {why}"
                )
    return Ability(True, f"by the kernel's routes; --topology spreads it over {', '.join(names)}")


class TcpPeer:
    """A remote segment behind one or more ``host:port``."""

    def __init__(self, context: ConnectContext, network: Network) -> None:
        self._context = context
        self._network = network

    def paths(self, rank: int) -> list[Path]:
        """Return every (local device, endpoint, stream); with a topology, of devices that reach the endpoint."""
        config, endpoints = self._context.config, self._context.endpoints(NAME)
        if config.topology is not None:
            return _paths_over(config.topology, endpoints, config, rank)
        return [
            Path(each, device, stream, rank + each.distance)
            for stream in range(config.streams_per_peer)
            for each in endpoints
            for device in config.tcp_devices
        ]

    def connect(self) -> TcpLink:
        """Return a new link; its streams connect when the first slice is posted on them."""
        context = self._context
        return TcpLink(context.descriptor, context.session, context.fences, self._network)

    def close(self) -> None:
        """Do nothing: links share no connection."""


def _paths_over(topology: Topology, endpoints: Sequence[Endpoint], config: EngineConfig, rank: int) -> list[Path]:
    """Return every (device, reachable endpoint, stream), the preferred devices first; the kernel's choice if none."""
    pairs = pair(topology.usable, [Address.parse(each.address).host for each in endpoints])
    if not pairs:
        pairs = [("", index) for index in range(len(endpoints))]
    near = functools.partial(topology.distance, config.location)
    return [
        Path(endpoints[index], device, stream, rank + max(near(device), endpoints[index].distance))
        for stream in range(config.streams_per_peer)
        for device, index in pairs
    ]


class TcpLink(WiredLink[TcpStream]):
    """One batch's streams to one peer."""

    def __init__(self, descriptor: SegmentDescriptor, session: SessionKey, fences: Fences, network: Network) -> None:
        super().__init__(network.poller())
        self._descriptor = descriptor
        self._session = session
        self._fences = fences
        self._network = network

    # --- Link

    def poll(self, timeout_s: float) -> list[Completion]:
        """Send and receive what the sockets take and give."""
        for stream in tuple(self._connections.values()):
            if stream.has_output and not stream.blocked:
                self._send(stream)
        self._serve_ready(0 if self._ended else timeout_s)
        return self._take_ended()

    def exchange(
        self,
        path: Path,
        opcode: Opcode,
        memory: memoryview,
        lease_id: int,
        remote_offset: int,
        timeout_s: float,
    ) -> bool:
        """Move one plain slice, fast if the path's stream is idle; return whether it arrived. If not, ``resume``."""
        stream = self._connections.get(path)
        if stream is None or stream.num_fences < self._fences.num_added:
            return False
        return stream.exchange(opcode, memory, lease_id, remote_offset, timeout_s)

    def resume(self, path: Path, piece: Slice) -> None:
        """Continue the slice that ``exchange`` did not finish, or begin it; ``poll`` returns its outcome."""
        stream = self._connections.get(path)
        if stream is None or not stream.interrupted:
            self.post(piece, path)
            return
        try:
            stream.resume(piece, self._ended)
            if stream.blocked:
                self._update_poller(stream)
        except ConnectionBroken as broken:
            self._break(path, broken.error)

    # --- WiredLink

    def _connect(self, path: Path) -> TcpStream:
        sock = self._network.connect(path, Address.parse(path.endpoint.address))
        stream = TcpStream(path, sock, self._descriptor, self._session)
        self._watch(stream, stream.fileno(), stream.interest)
        self._fence(stream)
        return stream

    def _queue(self, connection: TcpStream, piece: Slice) -> None:
        self._fence(connection)
        connection.queue_slice(piece)

    def _serve(self, connection: TcpStream, fd: int, events: int) -> None:
        if fd != connection.fileno():
            return
        if events != select.EPOLLIN:
            connection.send()
        connection.receive(self._ended)
        if connection.blocked is not connection.watched_blocked:
            self._update_poller(connection)

    def _shut(self, connection: TcpStream) -> None:
        if connection.writes_unanswered:
            self._fences.add(connection.token)
        connection.close()

    # --- inside

    def _fence(self, stream: TcpStream) -> None:
        """Have the peer cut the abandoned connections before it reads what is queued next."""
        if stream.num_fences < self._fences.num_added:
            stream.queue_fences(*self._fences.since(stream.num_fences))

    def _send(self, stream: TcpStream) -> None:
        try:
            stream.send()
        except ConnectionBroken as broken:
            self._break(stream.path, broken.error)
            return
        if stream.blocked is not stream.watched_blocked:
            self._update_poller(stream)

    def _update_poller(self, stream: TcpStream) -> None:
        self._poller.modify(stream.fileno(), stream.interest)
        stream.watched_blocked = stream.blocked
