"""Local side of rdma: this process's open devices, the memory registered with them, and staged buffers.

Owns the devices' life: they are opened once, and closed when the last user has gone. Buffers larger than STAGED_BYTES
are registered whole on first use and stay so while the Buffer lives (``TransferEngine.register`` once, use often: 16
MiB take 56-150 ms on soft-RoCE). Smaller ones are copied through ``staged_slots``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.transports.onesided.connection import StagedSlots
from tanghulu.transfer_engine.transports.rdma.verbs import Device, DeviceInfo, MemoryRegion, probe

#: Slots of STAGED_BYTES each, by link and device.
NUM_SLOTS = 64


class StagingMemory:
    """Slots registered with a device; used by one thread at a time."""

    def __init__(self, device: Device) -> None:
        self.slots = StagedSlots(NUM_SLOTS)
        self._region = device.register(self.slots.memory.address, self.slots.memory.size_bytes, remote=False)
        self.key = self._region.local_key

    def close(self) -> None:
        """Unpin; no slot is in use."""
        assert self.slots.idle, "a slot is in use"
        self._region.close()


class LocalDevices:
    """The devices used by one engine's rdma links; thread-safe."""

    def __init__(self, infos: Sequence[DeviceInfo]) -> None:
        self.names = tuple(info.name for info in infos)
        self._infos = {info.name: info for info in infos}
        self._open: dict[str, Device] = {}
        self._num_users = 1  # the engine
        self._lock = threading.Lock()

    @classmethod
    def find(cls, wanted: Sequence[str]) -> LocalDevices:
        """Find the usable devices of this machine; ``wanted`` names and orders them (empty: all, by name).

        Raises NodeUnavailable, with the reason, if there is none or one of ``wanted`` is not usable.
        """
        found = probe()
        by_name = {info.name: info for info in found.devices}
        if not by_name:
            raise NodeUnavailable(found.reason)
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise NodeUnavailable(f"RDMA devices {missing} cannot be used; there are {sorted(by_name)} {found.reason}")
        return cls([by_name[name] for name in wanted] if wanted else list(found.devices))

    def device(self, name: str) -> Device:
        """Return the open device; raises NodeUnavailable if it cannot be opened."""
        with self._lock:
            device = self._open.get(name)
            if device is None:
                device = self._open[name] = Device(self._infos[name])
            return device

    def region(self, name: str, buffer: Buffer) -> MemoryRegion:
        """Return the buffer's registration with one device, made on first use; raises TransferFailed if refused."""
        device = self.device(name)
        with self._lock:
            region = buffer.regions.get(device)
            if region is None:
                region = device.register(buffer.address, buffer.size_bytes, remote=False, writable=not buffer.read_only)
                buffer.regions[device] = region
            assert isinstance(region, MemoryRegion), "only this file registers buffers"
            return region

    def use(self) -> None:
        """Count a link about to use the devices; ``let_go`` ends it."""
        with self._lock:
            self._num_users += 1

    def let_go(self) -> None:
        """Count one user less; the last one closes the devices (and the buffers' registrations with them)."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                for device in self._open.values():
                    device.close()
                self._open.clear()
