"""The shm transport: the peer's memory is mapped here, and a slice is one memmove by the calling thread.

Owns the connection to the owner's Unix socket and the memory obtained through it. The copy is done when ``post``
returns, so nothing can land later, in either memory: a failed WRITE leaves no duplicate behind. The owner handles
expired leases on mapped memory (it quarantines the range until this process exits or releases it).

The mapping of a dead process's segment remains readable. So every copy is followed by a check that the peer's end of
the connection is still open: bytes written into, or read from, a segment no longer served are not reported as arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct

from tanghulu.errors import ChecksumMismatch, InvalidRequest, NodeUnavailable, TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.runtime.fork import lose_in_children
from tanghulu.runtime.tasks import undo_on_error
from tanghulu.transfer_engine.core.buffers import Memory
from tanghulu.transfer_engine.core.config import MIB, TransportLimits
from tanghulu.transfer_engine.core.paths import Path, endpoint_paths
from tanghulu.transfer_engine.core.segment import Endpoint, MemorySegment, SegmentDescriptor, SessionKey, map_shared
from tanghulu.transfer_engine.core.slices import Opcode, Slice
from tanghulu.transfer_engine.core.transport import (
    Ability,
    Arrived,
    Completion,
    ConnectContext,
    Corrupt,
    Lost,
    ServeContext,
)
from tanghulu.transfer_engine.core.wire import (
    SHM_ANSWER_BYTES,
    MalformedMessage,
    OtherVersion,
    check_shm_answer_version,
    digest_of,
    pack_shm_hello,
    parse_error,
    parse_shm_answer,
    typed_error,
)
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.transports.shm.listener import ShmListener
from tanghulu.transfer_engine.transports.shm.long_copy import LONG_BYTES, CopyHelper, Digest
from tanghulu.transfer_engine.transports.shm.memory import MappedMemory, ProcessMemory, may_trace

NAME = "shm"
LIMITS = TransportLimits(slice_bytes=16 * MIB, window_bytes=32 * MIB, window_slices=256)
_PROBE_BYTES = 4096
#: The segment for reading and for writing, and the owner's published area.
_MAX_DESCRIPTORS = 3
_CREDENTIALS = struct.Struct("3i")
#: Keeps the GIL (see ``copying``). Its arguments' types are not declared: converting them takes longer than the call.
_poll = ctypes.PyDLL(None).poll


class _Poll(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def connect(context: ConnectContext) -> ShmPeer:
    """Return another process's segment on this host, mapped. Raises as ``ShmPeer.open``; NodeUnavailable elsewhere."""
    descriptor = context.descriptor
    if descriptor.host_id != context.host_id:
        raise NodeUnavailable(f"the segment is on host {descriptor.host_id!r}, this process on {context.host_id!r}")
    failure: TanghuluError | None = None
    for endpoint in context.endpoints(NAME):
        try:
            return ShmPeer.open(descriptor, endpoint, context.session, context.config.connect_timeout_s)
        except TanghuluError as error:
            failure = error
    raise failure or NodeUnavailable("the descriptor has no such endpoint")


def serve(context: ServeContext) -> ShmListener:
    """Return the Unix socket at which processes of this host and user get the segment's memory."""
    return ShmListener(context)


def probe(topology: Topology) -> Ability:
    """Return whether memory can be shared here, and whether it can be copied where it cannot be mapped."""
    segment = MemorySegment.create("probe", _PROBE_BYTES)
    try:
        map_shared(segment.fd, _PROBE_BYTES).close()
    finally:
        segment.close()
    else_copied = ", or copied by the kernel where that fails" if may_trace(os.getppid()) else ""
    return Ability(True, f"to processes of this user on this host: mapped memory{else_copied}")


class ShmPeer:
    """A segment of this host: mapped, or else reached by the kernel's copies (see ``memory``).

    Thread-safe. The pages are unmapped when the last reference to this object and to ``view`` is gone, never under a
    running copy.
    """

    def __init__(self, sock: socket.socket, memory: MappedMemory | ProcessMemory, endpoint: Endpoint) -> None:
        self.view = memory.view
        self.published = memory.published
        self._memory = memory
        self._sock = sock
        self._endpoint = endpoint
        self._watched = _Poll(sock.fileno(), select.POLLIN)
        self._watched_pointer = ctypes.byref(self._watched)
        self._closed = False

    def paths(self, rank: int) -> list[Path]:
        """Return the Unix socket through which the memory came."""
        return endpoint_paths([self._endpoint], rank)

    @classmethod
    def open(cls, descriptor: SegmentDescriptor, endpoint: Endpoint, session: SessionKey, timeout_s: float) -> ShmPeer:
        """Connect to the owner's Unix socket and map the segment.

        Raises NodeUnavailable if nobody answers within ``timeout_s`` or the memory cannot be reached, and the owner's
        refusal (Unauthorized, NodeUnavailable for another generation, Overloaded); VersionMismatch.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with undo_on_error(sock.close):
                lose_in_children(sock)
                sock.settimeout(timeout_s)
                sock.connect(endpoint.address)
                sock.sendall(pack_shm_hello(descriptor.name, descriptor.generation, session))
                memory = _receive_memory(sock, descriptor.size_bytes)
                sock.setblocking(False)
                return cls(sock, memory, endpoint)
        except OtherVersion as error:
            raise typed_error(error, f"shm socket {endpoint.address}") from error
        except (OSError, MalformedMessage) as error:
            raise NodeUnavailable(f"shm socket {endpoint.address}: {error or type(error).__name__}") from error

    @property
    def writable_view(self) -> memoryview | None:
        """The content of ``view``, for writing; None if this process may not write, or the pages are not here."""
        return self._memory.writable_view

    def copy(self, opcode: Opcode, local: Memory, local_offset: int, remote_offset: int, length: int) -> None:
        """Move the bytes now; the caller has checked the ranges. Check ``alive`` afterwards.

        Raises NodeUnavailable where the memory is out of reach, or a write is not allowed.
        """
        if self.view is None and not self.alive:
            raise self.gone()
        self._memory.copy(opcode, local, local_offset, remote_offset, length)

    def copy_shown(
        self,
        helper: CopyHelper,
        opcode: Opcode,
        local: Memory,
        local_offset: int,
        remote_offset: int,
        length: int,
        digest: Digest | None,
    ) -> None:
        """Do ``copy``, with the helper's help if it is long; ``digest`` is shown the bytes on this side."""
        memory = self._memory
        if length >= LONG_BYTES and isinstance(memory, MappedMemory):
            memory.copy_long(helper, opcode, local, local_offset, remote_offset, length, digest)
            return
        self.copy(opcode, local, local_offset, remote_offset, length)
        if digest is not None:
            digest.add(local.array[local_offset : local_offset + length].data)

    def touch(self, offset: int, length: int) -> None:
        """Map, in one go, the pages of a range of ``writable_view`` that the caller is about to write."""
        self._memory.touch(offset, length)

    def digest(self, offset: int, length: int) -> int:
        """Return the checksum of the segment's bytes there."""
        return self._memory.digest(offset, length)

    @property
    def alive(self) -> bool:
        """Whether the owner still keeps open its end of the connection, which carries no messages.

        Checked after every copy, so it keeps the GIL: nobody can close the descriptor between the look at ``_closed``
        and the call.
        """
        if self._closed:
            return False
        found = _poll(self._watched_pointer, 1, 0)
        while found < 0:  # a signal arrived meanwhile
            found = _poll(self._watched_pointer, 1, 0)
        return bool(found == 0)

    def gone(self) -> NodeUnavailable:
        """Return the error to report when the owner is not ``alive``."""
        return NodeUnavailable(f"shm socket {self._endpoint.address}: the segment's owner closed the connection")

    def connect(self) -> ShmLink:
        """Return a link; all share the mapping."""
        return ShmLink(self)

    def close(self) -> None:
        """Close the connection. The pages stay mapped while they are held."""
        if not self._closed:
            self._closed = True
            self._sock.close()
            self._memory.close()


class ShmLink:
    """The mapping as a link: everything ends inside ``post``."""

    def __init__(self, peer: ShmPeer) -> None:
        self._peer = peer
        self._ended: list[Completion] = []

    def greet(self, path: Path, timeout_s: float, clock: Clock) -> None:
        """Return at once: the owner admitted this process when the memory was mapped."""

    def post(self, piece: Slice, path: Path) -> None:
        """Copy the slice, unless the owner was found gone since the last poll: the slice is lost with the others."""
        if self._ended and isinstance(self._ended[-1], Lost):
            return
        try:
            self._ended.append(self._copied(piece, path))
        except NodeUnavailable as error:
            self._ended.append(Lost(path, error))

    def _copied(self, piece: Slice, path: Path) -> Completion:
        peer = self._peer
        peer.copy(piece.opcode, piece.buffer, piece.local_offset, piece.remote_offset, piece.length)
        if not peer.alive:
            return Lost(path, peer.gone())
        if piece.verified and digest_of(piece.memory()) != peer.digest(piece.remote_offset, piece.length):
            text = f"{path.label}: {piece.length} bytes were copied, and are not the same on both sides"
            return Corrupt(piece.slice_id, ChecksumMismatch(text))
        return Arrived(piece.slice_id)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return what ended inside ``post``; never waits."""
        ended, self._ended = self._ended, []
        return ended

    def cut(self, path: Path) -> None:
        """Forget what ended; no copy is running."""
        self._ended.clear()

    @property
    def reusable(self) -> bool:
        """Whether every end was reported."""
        return not self._ended

    def fileno(self) -> int:
        """Return -1: there is nothing to wait for."""
        return -1

    def wake(self) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing: the mapping belongs to the peer."""

    def check(self) -> None:
        """Assert the invariants: nothing is copied after the owner was found gone."""
        assert not any(isinstance(each, Lost) for each in self._ended[:-1])


def _receive_memory(sock: socket.socket, size_bytes: int) -> MappedMemory | ProcessMemory:
    """Read the owner's answer; map the descriptor that came with it, and close it."""
    data, fds, _, _ = socket.recv_fds(sock, SHM_ANSWER_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        check_shm_answer_version(data)
        data += _receive(sock, SHM_ANSWER_BYTES - len(data))
        text_bytes, actual_bytes, address = parse_shm_answer(data)
        if text_bytes:
            raise parse_error(_receive(sock, text_bytes))
        if actual_bytes != size_bytes:
            raise MalformedMessage(f"the owner's segment has {actual_bytes} bytes, its descriptor says {size_bytes}")
        return _memory(sock, fds, size_bytes, address)
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _memory(sock: socket.socket, fds: list[int], size_bytes: int, address: int) -> MappedMemory | ProcessMemory:
    why = "no descriptor came through"
    if fds:
        try:
            area = map_shared(fds[0], size_bytes)
            return MappedMemory(area, _writing_fd(fds), _published(fds))
        except InvalidRequest as error:  # it may shrink under us, or is another one
            raise MalformedMessage(error.message) from error
        except OSError as error:
            why = f"its descriptor cannot be mapped: {error}"
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        return ProcessMemory(pid, address)
    except NodeUnavailable as error:
        raise NodeUnavailable(f"{why}; {error.message}") from error


def _writing_fd(fds: list[int]) -> int | None:
    """Return a descriptor for writing the segment of the first one; a copy that the caller owns."""
    inode = os.fstat(fds[0]).st_ino
    for fd in fds:
        if os.fstat(fd).st_ino == inode and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
            return os.dup(fd)
    return None


def _published(fds: list[int]) -> mmap.mmap | None:
    """Return the mapping of the area that the owner publishes beside the segment: another file."""
    inode = os.fstat(fds[0]).st_ino
    for fd in fds:
        found = os.fstat(fd)
        if found.st_ino != inode:
            return map_shared(fd, found.st_size)
    return None


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the owner closed the connection inside its answer")
        data += piece
    return data
