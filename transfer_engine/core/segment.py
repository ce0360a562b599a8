"""Memory offered by a process to its peers, and the descriptor by which peers find it.

Owns the shared mapping's life (create, seal, unmap) and the meaning of the descriptor, which travels unchanged.
Independent of sockets and leases.

Write access: peers map a segment by a file descriptor open for reading only, so their pages can neither be mapped nor
made writable; peers allowed to write get a second one, and map it when they first write. Data that only the owner
writes lies in an area of its own (``PublishedArea``), which the kernel lets no other process map for writing or write.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final, NamedTuple

import numpy as np
import structlog

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.methods import HelloReply, HelloRequest
from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.runtime.fork import keep_reserved
from tanghulu.runtime.tasks import undo_on_error
from tanghulu.transfer_engine.core.page_touch import PageToucher

_log = structlog.get_logger(__name__)

#: A segment can neither shrink (a reader of its mapping would get SIGBUS) nor grow, and nobody can lift that.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: From Linux 5.1: no write, and no mapping for writing, except through mappings made before.
F_SEAL_FUTURE_WRITE = 0x0010
MAX_NAME_BYTES = 255
_MAX_MEMFD_NAME_BYTES = 200
_PRIVATE_MODE = 0o400


class Endpoint(FastMessage, frozen=True):
    """One way to reach a segment.

    ``transport`` is ``"shm"`` (``address``: path of the Unix socket that passes the descriptor), ``"tcp"``, or
    ``"rdma"`` or ``"ucx"`` (``address``: ``host:port``, for these two of their control connections). ``device`` names
    the remote device (NIC) behind it, empty if irrelevant; ``distance`` is 0 when that is one of the owner's preferred
    devices for this segment, 1 when it comes after those.
    """

    transport: str
    address: str
    device: str = ""
    distance: U32 = 0


class SegmentDescriptor(FastMessage, frozen=True):
    """Everything a peer needs to open a segment; a value, valid while the process of ``generation`` lives.

    ``host_id`` is equal for processes that can share memory. A restarted process offers another ``generation``,
    and transfers that name the old one are refused.
    """

    name: str
    size_bytes: U64
    host_id: str
    generation: U64
    endpoints: tuple[Endpoint, ...]

    def endpoints_of(self, transport: str) -> tuple[Endpoint, ...]:
        """Return the endpoints of one transport, in the owner's order of preference."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.transport == transport)


class SessionKey(NamedTuple):
    """A session at a segment's owner, and the secret by which the caller proves on each connection that it owns it."""

    session_id: U64
    secret: bytes


SECRET_BYTES: Final = 16
#: For segments whose owner keeps no leases.
NO_SESSION: Final = SessionKey(0, bytes(SECRET_BYTES))


class SegmentHello(HelloRequest, frozen=True):
    """HELLO of a caller that will read or write the server's segment. ``wants_shm``: by mapping it."""

    client_id: str = ""
    host_id: str = ""
    wants_shm: bool = False


class SegmentWelcome(HelloReply, frozen=True):
    """The answer: the server, its ``generation``, the caller's session and the segment; transfers name all of them."""

    instance_id: str
    generation: U64
    session: SessionKey
    segment: SegmentDescriptor


class MemorySegment:
    """A shared memory area of fixed size, owned by this process.

    It has no name in any file system, so nothing is left behind whatever ends the process. ``view`` is writable, of
    format ``B``, and valid until ``close()``. Peers map the same pages through ``descriptors``. ``published``: data
    beside the segment that peers can only read.
    """

    def __init__(self, name: str, fd: int, area: mmap.mmap, published: PublishedArea | None = None) -> None:
        self.name = name
        self.fd = fd  # -1 once closed
        self.published = published
        self._reading_fd = _reading_fd(fd)
        self.size_bytes = len(area)
        self.view = memoryview(area)
        self._area = area
        self._toucher = PageToucher(area, least_bytes=1)

    @classmethod
    def create(cls, name: str, size_bytes: int, *, prefault: bool = False, published_bytes: int = 0) -> MemorySegment:
        """Make a zeroed area of ``size_bytes`` and seal its size; and a published one, if it has any bytes.

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
        fd, area = _make_area(label, size_bytes, prefault=prefault)
        with undo_on_error(lambda: os.close(fd)), undo_on_error(area.close):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            published = None if not published_bytes else PublishedArea(label, published_bytes, prefault=prefault)
            return cls(name, fd, area, published)

    def touch(self, offset: int, length: int) -> None:
        """Touch the pages of a range first, so that they count as this process's memory and not as a peer's."""
        self._toucher.touch(offset, length)

    def descriptors(self, *, writable: bool) -> list[int]:
        """Return a peer's descriptors: the segment for reading, the published area, and, if allowed, for writing."""
        fds = [self._reading_fd]
        if self.published is not None:
            fds.append(self.published.fd)
        if writable:
            fds.append(self.fd)
        return fds

    @property
    def address(self) -> int:
        """Address of the memory in this process."""
        return int(np.frombuffer(self.view, np.uint8).__array_interface__["data"][0])

    def close(self) -> None:
        """Close the descriptor and unmap. Views still held by the owner keep the mapping alive until dropped."""
        if self.fd < 0:
            return
        os.close(self._reading_fd)
        os.close(self.fd)
        self.fd = -1
        unmap(self.view, self._area)
        del self.view, self._area, self._toucher  # or this object would keep what others release later
        if self.published is not None:
            self.published.close()

    def check(self) -> None:
        """Assert the invariants: the descriptor of an open segment has the sealed size."""
        if self.fd >= 0:
            assert os.fstat(self.fd).st_size == self.size_bytes == len(self.view)

    def __repr__(self) -> str:
        return f"MemorySegment({self.name!r}, {self.size_bytes} bytes{', closed' if self.fd < 0 else ''})"


class PublishedArea:
    """A zeroed shared area that its owner writes, by ``view``, and that no other process ever can.

    On kernels that lack the seal a peer only gets a descriptor for reading, and the log reports it.
    """

    def __init__(self, label: str, size_bytes: int, *, prefault: bool) -> None:
        fd, self._area = _make_area(label + "-published", size_bytes, prefault=prefault)
        try:
            with undo_on_error(self._area.close):
                _seal_published(fd)
                self.fd = _reading_fd(fd)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        self.view = memoryview(self._area)

    def close(self) -> None:
        """Close the descriptor and unmap."""
        os.close(self.fd)
        unmap(self.view, self._area)
        del self.view, self._area


def _make_area(label: str, size_bytes: int, *, prefault: bool) -> tuple[int, mmap.mmap]:
    """Return a descriptor that can be sealed, and its writable mapping."""
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with undo_on_error(lambda: os.close(fd)):
        os.ftruncate(fd, size_bytes)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
        return fd, mmap.mmap(fd, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _seal_published(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | F_SEAL_FUTURE_WRITE)
    except OSError as error:
        _log.warning("segment.not_sealed", error=str(error), now="peers get a descriptor for reading only")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def _reading_fd(fd: int) -> int:
    """Return the same file, open for reading only. Its mode keeps other processes from writing it through /proc.

    A process of the same user can change the mode again, as it can write to this one's memory (ptrace): this guards
    against mistakes, and against peers limited to the right to read.
    """
    try:
        os.fchmod(fd, _PRIVATE_MODE)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _log.warning("segment.not_read_only", error=str(error), now="peers could map it writable")
        return os.dup(fd)


def unmap(view: memoryview, area: mmap.mmap) -> None:
    """Release ``view`` and unmap ``area``; slices of the view held elsewhere keep the pages until they are dropped."""
    try:
        view.release()
        area.close()
    except BufferError:
        pass  # slices of it are still held: the last of them unmaps when dropped


def map_shared(fd: int, size_bytes: int, *, writable: bool = False) -> mmap.mmap:
    """Map a peer's segment, for reading unless ``writable``; the caller keeps ``fd`` and may close it at once.

    The mapping is not inherited by forked children: the owner watches this process alone (pidfd), and a child that
    outlived it could touch ranges freed on its exit. Raises InvalidRequest if the area could shrink or does not have
    the promised size.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise InvalidRequest("the peer's segment is not sealed against shrinking; refusing to map it")
    actual_bytes = os.fstat(fd).st_size
    if actual_bytes != size_bytes:
        raise InvalidRequest(f"the peer's segment has {actual_bytes} bytes, its descriptor says {size_bytes}")
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    area = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=prot)
    area.madvise(mmap.MADV_DONTFORK)
    keep_reserved(area)
    return area
