"""Owner's ends of rdma: the segment registered with every device, and a queue pair for each client.

Owns the devices and the memory regions. It takes no part in transfers; ``onesided.listener`` decides who gets a queue
pair, and when it must go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.transports.onesided.listener import Grant
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.rdma.verbs import Device, MemoryRegion, QueuePair
from tanghulu.transfer_engine.transports.rdma.wire import RDMA, QueuePairAddress, SegmentKey, pack_granted, parse_asked

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

    def admit(self, asked: bytes) -> None:
        """Raise NodeUnavailable if there is no such device, MalformedMessage."""
        device, _ = parse_asked(asked)
        self._region(device)

    async def make(self, token: int, asked: bytes, take: Callable[[Grant], None]) -> None:
        """Hand ``take`` a queue pair connected to the client's.

        In a thread, because the kernel may take a second to resolve the client's address; the devices stay open until
        ``take`` has returned. Raises TransferFailed or NodeUnavailable.
        """
        name, peer = parse_asked(asked)
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
