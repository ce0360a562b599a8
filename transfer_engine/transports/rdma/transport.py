"""The rdma transport: one-sided READ and WRITE through RC queue pairs, one path per pair of devices.

Owns the staging memory of a link, by device. The owner's process takes no part in a transfer: it registered its segment
once per device and answers the set-up of queue pairs, and it computes the checksum of a verified slice's range.

No late duplicate of a failed WRITE. RC delivers a packet of a queue pair at most once, in order, and only while both
ends live, so what could land late is what is on the wire when this end gives up. A path that failed, stalled or was
given up has its queue pair destroyed here (no READ lands, nothing is sent any more), and the owner is asked to destroy
its end before anything else happens; where it does not answer in time, the pair's token becomes a fence: every
connection to that owner, over rdma or tcp, tells it first and posts no slice before the owner has answered that the old
end is gone. A retry therefore always lands behind its predecessor's end, and so does every later batch. For everybody
else the lease is the guard: the owner destroys a session's queue pairs before it reuses a range whose lease has run out
(see ``access``). What a holder gives back itself it promises not to touch, as under shm.

Within the segment a session is trusted, as under shm: the device checks the segment's bounds, not leases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tanghulu.transfer_engine.core.fences import Fences
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.segment import SegmentDescriptor
from tanghulu.transfer_engine.transports.onesided.link import OneSidedPeer
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices, Staging
from tanghulu.transfer_engine.transports.rdma.mover import RdmaMover
from tanghulu.transfer_engine.transports.rdma.wire import RDMA


def rdma_peer(descriptor: SegmentDescriptor, session_id: int, devices: LocalDevices, fences: Fences) -> OneSidedPeer:
    """A remote segment behind one or more devices."""
    return OneSidedPeer(descriptor, session_id, fences, lambda: RdmaMovers(devices))


def pair_devices(names: Sequence[str], num_remote: int) -> list[tuple[str, int]]:
    """(local device, index of the owner's rdma endpoint) of every path.

    The n-th local device talks to the n-th of the owner's, in the order in which both are named: rails, as clusters are
    wired. The longer list starts again at the front of the shorter one. Example: two here, three there: 0-0, 1-1, 0-2.
    """
    return [(names[n % len(names)], n % num_remote) for n in range(max(len(names), num_remote))]


class RdmaMovers:
    """One link's queue pairs: they share the devices, and the staging memory of each."""

    dialect = RDMA

    def __init__(self, devices: LocalDevices) -> None:
        self._devices = devices
        self._staging: dict[str, Staging] = {}
        devices.use()

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> RdmaMover:
        """A queue pair of the path's device; raises NodeUnavailable, TransferFailed."""
        name = path.local_device
        staging = self._staging.get(name)
        if staging is None:
            staging = self._staging[name] = Staging(self._devices.device(name))
        return RdmaMover(self._devices, name, path.endpoint.device, staging, wake)

    def close(self) -> None:
        """Unpin the staging memory and let the devices go."""
        for staging in self._staging.values():
            staging.close()
        self._staging.clear()
        self._devices.let_go()
