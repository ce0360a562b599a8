"""A segment of another process as this process reaches it: its paths, its links, its mapping.

Owns what is opened per peer. Which path a slice takes is decided by ``paths``; who may use a RemoteSegment is the
engine's business.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.runtime.busy_polling import BusyPoller, paying_spin_s
from tanghulu.runtime.clock import Clock
from tanghulu.transfer_engine.client.link_pool import LinkPool
from tanghulu.transfer_engine.core.config import EngineConfig
from tanghulu.transfer_engine.core.links import WiredLink
from tanghulu.transfer_engine.core.network import Network
from tanghulu.transfer_engine.core.paths import Path, PathState, PathStats, PathTable, PauseRule
from tanghulu.transfer_engine.core.segment import SegmentDescriptor
from tanghulu.transfer_engine.core.transport import Link, Peer
from tanghulu.transfer_engine.topology.devices import Topology, pair
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.rdma.transport import pair_devices, rdma_peer
from tanghulu.transfer_engine.transports.shm.transport import ShmPeer
from tanghulu.transfer_engine.transports.tcp.tls import TlsNetwork
from tanghulu.transfer_engine.transports.tcp.transport import TcpPeer
from tanghulu.transfer_engine.transports.ucx.transport import ucx_peer
from tanghulu.types import Address


class RemoteSegment:
    """An open segment; made by ``TransferEngine.open_segment``. Safe to use from several threads.

    ``transport`` names the one that is preferred (and, if pinned, the only one).
    """

    def __init__(
        self,
        descriptor: SegmentDescriptor,
        session_id: int,
        transports: Sequence[str],
        config: EngineConfig,
        clock: Clock,
        shm: ShmPeer | None,
        network: Network | None = None,
        rdma: LocalDevices | None = None,
    ) -> None:
        assert transports, "a segment is reached over at least one transport"
        self.descriptor = descriptor
        self.session_id = session_id
        self.size_bytes = descriptor.size_bytes
        self.transport = transports[0]
        self.shm = shm
        self._peers: dict[str, Peer] = {}
        if shm is not None:
            self._peers["shm"] = shm
        if network is None and config.tls:
            network = TlsNetwork(config.tls)
        self._tcp = TcpPeer(descriptor, session_id, network)
        self._peers["tcp"] = self._tcp  # for notices, if for nothing else
        if rdma is not None and "rdma" in transports:
            self._peers["rdma"] = rdma_peer(descriptor, session_id, rdma, self._tcp.fences)
        if "ucx" in transports:
            self._peers["ucx"] = ucx_peer(descriptor, session_id, self._tcp.fences)
        self._pools = {
            name: LinkPool(peer.connect, config.max_links_per_peer, clock) for name, peer in self._peers.items()
        }
        rule = PauseRule(config.pause_after_errors, config.pause_s, config.pause_max_s)
        self.paths = PathTable(_paths(descriptor, transports, config, () if rdma is None else rdma.names), rule)
        #: The links that serve each path.
        self.pools = {path: self._pools[path.transport] for path in self.paths.paths}
        spin_s = paying_spin_s(config.spin_s)
        #: For one caller at a time that waits for this peer; None: nobody spins.
        self.spinner = BusyPoller(spin_s, clock) if spin_s > 0 else None
        #: Whether ``close()`` has been called.
        self.closed = False

    @property
    def name(self) -> str:
        """The segment's name."""
        return self.descriptor.name

    def map(self) -> memoryview | None:
        """The segment's memory itself when the transport is shm, else None; for views without a copy.

        Writable, of format ``B``, valid until ``close()``; slices of it keep the pages mapped longer. Touch only
        ranges on which a lease with ``shm`` is held, and verify checksums: the owner may be gone.
        """
        shm = self.shm
        return shm.view if shm is not None else None

    def touch(self, offset: int, length: int) -> None:
        """The caller is about to write to that range of what ``map()`` gave: cheaper than a fault for each page."""
        if self.shm is not None:
            self.shm.touch(offset, length)

    @property
    def alive(self) -> bool:
        """Whether the segment is open and, under shm, its owner still keeps the connection; over tcp, open."""
        shm = self.shm
        return not self.closed and (shm is None or shm.alive)

    def greet(self, timeout_s: float, clock: Clock) -> None:
        """Make sure that an endpoint of the preferred transport (not shm) serves this segment.

        Raises NodeUnavailable or its refusal.
        """
        errors: list[TanghuluError] = []
        for path in self.paths.paths:
            if path.transport != self.transport or path.stream:
                continue
            link = self._peers[path.transport].connect()
            assert isinstance(link, WiredLink), "shm greets when it maps"
            try:
                link.greet(path, timeout_s, clock)
            except TanghuluError as error:
                link.close()
                errors.append(error)
                continue
            self._pools[self.transport].put(link)
            return
        raise errors[0] if errors else NodeUnavailable(f"segment {self.name!r} has no {self.transport} endpoint")

    def borrow(self, transport: str, until_s: float | None) -> Link | None:
        """A link of ``transport`` for one batch, or None if all are lent until ``until_s``."""
        return self._pools[transport].borrow(until_s)

    def give_back(self, transport: str, link: Link) -> None:
        """Return a borrowed link."""
        self._pools[transport].give_back(link)

    def close(self) -> None:
        """Let go of the peer, for everybody who opened this segment. Batches in flight fail or end by themselves."""
        if self.closed:
            return
        self.closed = True
        for pool in self._pools.values():
            pool.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self.shm = None

    def path_stats(self) -> list[tuple[Path, PathState, PathStats]]:
        """Every path with what is believed about it and what happened on it, as it is now."""
        return [(path, self.paths.state(path), self.paths.stats(path)) for path in self.paths.paths]

    def check(self) -> None:
        """Assert the invariants of what it owns."""
        self.paths.check()
        for pool in self._pools.values():
            pool.check()

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"RemoteSegment({self.name!r}, generation={self.descriptor.generation}, {self.transport}{closed})"


def _paths(
    descriptor: SegmentDescriptor, transports: Sequence[str], config: EngineConfig, rdma_devices: tuple[str, ...]
) -> list[Path]:
    """Every (local device, endpoint, stream), ranked by the order of ``transports``; tcp for notices in any case."""
    paths: list[Path] = []
    if "tcp" not in transports and "tcp" in config.limits:
        paths = [Path(each, "", 0, 2 * len(transports), True) for each in descriptor.endpoints_of("tcp")]
    for number, transport in enumerate(transports):
        rank = 2 * number  # and the odd one behind it for devices that are not preferred
        if transport == "rdma":
            doors = descriptor.endpoints_of("rdma")
            pairs = pair_devices(rdma_devices, len(doors))
            paths += [Path(doors[remote], local, 0, rank) for local, remote in pairs]
            continue
        if transport == "tcp" and config.topology is not None:
            paths += _tcp_paths(descriptor, config.topology, config, rank)
            continue
        devices = config.tcp_devices if transport == "tcp" else ("",)
        streams = range(config.streams_per_peer if transport == "tcp" else 1)
        endpoints = descriptor.endpoints_of(transport)
        paths += [
            Path(e, device, stream, rank + e.distance) for stream in streams for e in endpoints for device in devices
        ]
    return paths


def _tcp_paths(descriptor: SegmentDescriptor, topology: Topology, config: EngineConfig, rank: int) -> list[Path]:
    """Every (device, endpoint that it reaches, stream), the preferred devices in front; the kernel's choice if none."""
    endpoints = descriptor.endpoints_of("tcp")
    pairs = pair(topology.usable, [Address.parse(each.address).host for each in endpoints])
    if not pairs:
        pairs = [("", index) for index in range(len(endpoints))]
    near = functools.partial(topology.distance, config.location)
    return [
        Path(endpoints[index], device, stream, rank + max(near(device), endpoints[index].distance))
        for stream in range(config.streams_per_peer)
        for device, index in pairs
    ]
