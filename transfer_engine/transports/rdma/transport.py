"""The rdma transport: one-sided READ and WRITE through RC queue pairs, one path per pair of devices.

Owns the staging memory of a link, by device. The owner's process takes no part in a transfer: it registered its segment
once per device and answers the set-up of queue pairs, and it computes the checksum of a verified slice's range.

No late duplicate of a failed WRITE. RC delivers a packet of a queue pair at most once, in order, and only while both
ends live, so only packets on the wire when this end gives up could land late. A path that failed, stalled or was given
up has its queue pair destroyed here (no READ lands, nothing is sent any more), and the owner is requested to destroy
its end before anything else happens; if it does not answer in time, the pair's token becomes a fence: every connection
to that owner, over rdma or tcp, sends it first and posts no slice before the owner has confirmed that the old end is
gone. A retry therefore always lands after its predecessor's end, and so does every later batch. Everybody else is
guarded by the lease: the owner destroys a session's queue pairs before it reuses a range whose lease has run out (see
``access``). A holder that gives a range back itself promises not to touch it, as under shm.

Within the segment a session is trusted, as under shm: the device checks the segment's bounds, not leases.

``onesided.listener`` decides which client gets a queue pair at the owner, and when it must go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import MIB, TransportLimits
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.core.transport import Ability, ConnectContext, ServeContext
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.transports.onesided.link import OneSidedPeer
from tanghulu.transfer_engine.transports.onesided.listener import Grant, OneSidedListener
from tanghulu.transfer_engine.transports.rdma import verbs
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices, StagingMemory
from tanghulu.transfer_engine.transports.rdma.mover import RdmaMover
from tanghulu.transfer_engine.transports.rdma.verbs import Device, MemoryRegion, QueuePair
from tanghulu.transfer_engine.transports.rdma.wire import (
    RDMA,
    QueuePairAddress,
    SegmentKey,
    pack_granted,
    parse_connect,
)

NAME = RDMA.protocol
LIMITS = TransportLimits(slice_bytes=1 * MIB, window_bytes=16 * MIB, window_slices=64)


def connect(context: ConnectContext) -> OneSidedPeer:
    """Return a remote segment behind one or more devices; raises NodeUnavailable without a device here.

    The engine's devices are looked up until some are found.
    """
    devices = context.shared.get(
        NAME, lambda: LocalDevices.find(context.config.rdma_devices), lambda found: found.let_go()
    )
    endpoints = context.endpoints(NAME)

    def paths(rank: int) -> list[Path]:
        return [Path(endpoints[far], near, 0, rank) for near, far in pair_devices(devices.names, len(endpoints))]

    return OneSidedPeer(context, lambda: RdmaMovers(devices), paths)


def serve(context: ServeContext) -> OneSidedListener:
    """Return the listener: queue pairs to the segment, on every requested device."""
    return OneSidedListener(RdmaEnds(context.segment, context.listen.rdma_devices), context)


def probe(topology: Topology) -> Ability:
    """Find the devices that work here."""
    found = verbs.probe()
    devices = ", ".join(f"{each.name} (mtu {each.mtu})" for each in found.devices)
    return Ability(bool(found.devices), devices or found.reason)


def pair_devices(names: Sequence[str], num_remote: int) -> list[tuple[str, int]]:
    """Return (local device, index of the owner's rdma endpoint) of every path.

    The n-th local device talks to the n-th of the owner's, in the order in which both are named: rails, as clusters are
    wired. The longer list starts again at the front of the shorter one. Example: two here, three there: 0-0, 1-1, 0-2.
    """
    return [(names[n % len(names)], n % num_remote) for n in range(max(len(names), num_remote))]


class RdmaMovers:
    """One link's queue pairs: they share the devices, and the staging memory of each."""

    dialect = RDMA

    def __init__(self, devices: LocalDevices) -> None:
        self._devices = devices
        self._staging: dict[str, StagingMemory] = {}
        devices.use()

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> RdmaMover:
        """Return a queue pair of the path's device; raises NodeUnavailable, TransferFailed."""
        name = path.local_device
        staging = self._staging.get(name)
        if staging is None:
            staging = self._staging[name] = StagingMemory(self._devices.device(name))
        return RdmaMover(self._devices, name, path.endpoint.device, staging, wake)

    def close(self) -> None:
        """Unpin the staging memory and release the devices."""
        for staging in self._staging.values():
            staging.close()
        self._staging.clear()
        self._devices.let_go()


#: Most queue pairs at once; a device has some 10^5 of them.
MAX_PAIRS = 4096


class RdmaEnds:
    """Makes the queue pairs of ``segment`` on ``device_names`` (empty: every usable device)."""

    dialect = RDMA

    def __init__(self, segment: MemorySegment, device_names: Sequence[str]) -> None:
        self.max_ends = MAX_PAIRS
        self._segment = segment
        self._wanted = device_names
        self._memory: Buffer | None = None
        self._regions: dict[str, tuple[Device, MemoryRegion]] = {}
        self._devices: LocalDevices | None = None

    @property
    def devices(self) -> list[str]:
        """Devices with which the segment is registered."""
        return list(self._regions)

    async def start(self) -> None:
        """Register the segment. Raises NodeUnavailable without a usable device, TransferFailed."""
        await asyncio.to_thread(self._register)

    def admit(self, connect_payload: bytes) -> None:
        """Raise NodeUnavailable if there is no such device, MalformedMessage."""
        device, _ = parse_connect(connect_payload)
        self._region(device)

    async def make(self, token: int, connect_payload: bytes, take: Callable[[Grant], None]) -> None:
        """Hand ``take`` a queue pair connected to the client's.

        In a thread, because the kernel may take a second to resolve the client's address; the devices stay open until
        ``take`` has returned. Raises TransferFailed or NodeUnavailable.
        """
        name, peer = parse_connect(connect_payload)
        devices, memory, (device, region) = self._devices, self._memory, self._region(name)
        assert devices is not None, "there are regions"
        assert memory is not None, "the segment is registered"
        devices.use()
        try:
            pair = await asyncio.to_thread(_connected_pair, device, peer)
            take(Grant(pair, pack_granted(pair.address, SegmentKey(memory.address, region.remote_key))))
        finally:
            devices.let_go()

    def close(self) -> None:
        """Release the memory and the devices."""
        for _, region in self._regions.values():
            region.close()
        self._regions.clear()
        self._memory = None
        if self._devices is not None:
            self._devices.let_go()
            self._devices = None

    # --- inside

    def _region(self, name: str) -> tuple[Device, MemoryRegion]:
        found = self._regions.get(name)
        if found is None:
            raise NodeUnavailable(f"device {name!r} does not serve this segment; there are {list(self._regions)}")
        return found

    def _register(self) -> None:
        self._devices = LocalDevices.find(self._wanted)
        self._memory = Buffer(self._segment.view)
        try:
            for name in self._devices.names:
                device = self._devices.device(name)
                region = device.register(self._memory.address, self._memory.size_bytes, remote=True)
                self._regions[name] = (device, region)
        except TanghuluError:
            self.close()
            raise


def _connected_pair(device: Device, peer: QueuePairAddress) -> QueuePair:
    pair = device.queue_pair(1)
    try:
        pair.connect(peer)
    except TanghuluError:
        pair.close()
        raise
    return pair
