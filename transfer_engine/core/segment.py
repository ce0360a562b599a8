"""Memory that a process offers to its peers, and the descriptor by which peers find it.

Owns the shared mapping's life (create, seal, unmap) and the descriptor's meaning. Knows nothing of
sockets, leases or protobuf (see ``descriptor_wire`` for the latter).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np

from tanghulu.errors import InvalidRequest
from tanghulu.runtime.fork import keep_reserved

#: A segment can neither shrink (a reader of its mapping would get SIGBUS) nor grow, and nobody can lift that.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_NAME_BYTES = 255
_MAX_MEMFD_NAME_BYTES = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to reach a segment.

    ``transport`` is ``"shm"`` (``address``: path of the Unix socket that passes the descriptor), ``"tcp"``, or
    ``"rdma"`` or ``"ucx"`` (``address``: ``host:port``, of these two where their control connections go). ``device``
    names the remote device (NIC) behind it, empty if it does not matter; ``distance`` is 0 when that is one of the
    owner's preferred devices for this segment, 1 when it comes after those.
    """

    transport: str
    address: str
    device: str = ""
    distance: int = 0


@dataclass(frozen=True, slots=True)
class SegmentDescriptor:
    """What a peer needs in order to open a segment; a value, valid while the process of ``generation`` lives.

    ``host_id`` is equal for processes that can share memory. A restarted process offers another ``generation``,
    and transfers that name the old one are refused.
    """

    name: str
    size_bytes: int
    host_id: str
    generation: int
    endpoints: tuple[Endpoint, ...]

    def endpoints_of(self, transport: str) -> tuple[Endpoint, ...]:
        """The endpoints of one transport, in the owner's order of preference."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.transport == transport)


class MemorySegment:
    """A shared memory area of fixed size, owned by this process.

    It has no name in any file system, so nothing is left behind however the process ends. ``view`` is writable,
    of format ``B``, and valid until ``close()``. Peers map the same pages through ``fd``.
    """

    def __init__(self, name: str, fd: int, area: mmap.mmap) -> None:
        self.name = name
        self.fd = fd
        self.size_bytes = len(area)
        self.view = memoryview(area)
        self._area = area
        self._closed = False

    @classmethod
    def create(cls, name: str, size_bytes: int, *, prefault: bool = False) -> MemorySegment:
        """Make a zeroed area of ``size_bytes`` and seal its size.

        ``prefault`` touches every page now, so that the first transfers do not pay for page faults.
        Raises InvalidRequest for an empty, overlong or NUL-carrying name or a size below one byte; OSError if the
        machine has no memory.
        """
        encoded = name.encode()
        if not 0 < len(encoded) <= MAX_NAME_BYTES or b"\0" in encoded:
            raise InvalidRequest(f"segment name {name!r} must have 1 to {MAX_NAME_BYTES} bytes and no NUL")
        if size_bytes < 1:
            raise InvalidRequest(f"segment {name!r} must have at least one byte, not {size_bytes}")
        label = "tanghulu-" + encoded[:_MAX_MEMFD_NAME_BYTES].decode(errors="ignore")
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
            area = mmap.mmap(fd, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:  # an interrupt, too: nobody else knows the descriptor; it is raised on
            os.close(fd)
            raise
        return cls(name, fd, area)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` has been called."""
        return self._closed

    @property
    def address(self) -> int:
        """The memory's address in this process."""
        return int(np.frombuffer(self.view, np.uint8).__array_interface__["data"][0])

    def close(self) -> None:
        """Close the descriptor and unmap. Views that the owner still holds keep the mapping alive until they go."""
        if self._closed:
            return
        self._closed = True
        os.close(self.fd)
        self.fd = -1
        unmap(self.view, self._area)

    def check(self) -> None:
        """Assert the invariants: the descriptor is open exactly while the segment is, and has the sealed size."""
        assert self._closed == (self.fd < 0)
        if not self._closed:
            assert os.fstat(self.fd).st_size == self.size_bytes == len(self.view)

    def __repr__(self) -> str:
        return f"MemorySegment({self.name!r}, {self.size_bytes} bytes{', closed' if self._closed else ''})"


def unmap(view: memoryview, area: mmap.mmap) -> None:
    """Release ``view`` and unmap ``area``; somebody's slices of the view keep the pages until they are dropped."""
    try:
        view.release()
        area.close()
    except BufferError:
        pass  # slices of it are still held: the last of them unmaps when it goes


def map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a peer's segment; the caller keeps ``fd`` and may close it at once.

    The mapping is not inherited by forked children: the owner watches this process alone (pidfd), and a child
    that outlived it could touch ranges that were freed on its exit. Raises InvalidRequest if the area could
    shrink under us or has not the promised size.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise InvalidRequest("the peer's segment is not sealed against shrinking; refusing to map it")
    actual_bytes = os.fstat(fd).st_size
    if actual_bytes != size_bytes:
        raise InvalidRequest(f"the peer's segment has {actual_bytes} bytes, its descriptor says {size_bytes}")
    area = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    area.madvise(mmap.MADV_DONTFORK)
    keep_reserved(area)
    return area
