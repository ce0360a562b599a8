"""Two ways to another process's segment on this host: its pages mapped here, or copies made by the kernel.

``ProcessMemory`` is for hosts where the pages cannot be had: the descriptor did not come through (no free descriptor, a
sandbox between) or cannot be mapped (no address space left). process_vm_readv and process_vm_writev need neither, only
the right to trace the owner: the same user, and no Yama or seccomp rule against it. That is tried at once, by reading a
byte. It is about half as fast as a mapping, and offers no views. Should the owner end while its connection still seems
open, its pid could in theory already be another process's; the check before each copy leaves the kernel microseconds to
use up all its pids.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref

import numpy as np

from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.transfer_engine.core.buffers import Bytes, Memory, copy
from tanghulu.transfer_engine.core.page_touch import PageToucher
from tanghulu.transfer_engine.core.segment import map_shared
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.core.wire import digest_of
from tanghulu.transfer_engine.transports.shm.long_copy import CopyHelper, Digest

_DIGEST_PIECE_BYTES = 64 << 20
_READ = Opcode.READ  # read at every copy, and an Enum takes ten times as long (Python 3.11)


class _Pages:
    """One mapping of a segment."""

    def __init__(self, area: mmap.mmap) -> None:
        self.area = area
        self.view = memoryview(area)
        self.array: Bytes = np.frombuffer(area, dtype=np.uint8)
        self.address: int = self.array.__array_interface__["data"][0]


class _WritablePages(_Pages):
    """The mapping for writes. This process often reads what it writes, so ``touch`` also maps it in ``read``."""

    def __init__(self, area: mmap.mmap, read: mmap.mmap) -> None:
        super().__init__(area)
        self.touch = PageToucher(area, read).touch


class MappedMemory:
    """The segment's pages in this process; they stay while ``view`` or slices of it are held.

    ``view`` is read-only: no reader can change a byte by mistake. Writes go through a second mapping, made for the
    first of them from ``writing_fd`` (owned by this object; None: this process may not write). ``published`` is the
    owner's published area, read-only too.
    """

    def __init__(self, area: mmap.mmap, writing_fd: int | None = None, published: mmap.mmap | None = None) -> None:
        self._read = pages = _Pages(area)
        self.view: memoryview | None = pages.view
        self.array, self.address = pages.array, pages.address
        self.published = None if published is None else memoryview(published)
        self._written: _WritablePages | None = None
        self._lock = threading.Lock()
        self._writing_fd = writing_fd
        self._close_fd = None if writing_fd is None else weakref.finalize(self, os.close, writing_fd)

    def close(self) -> None:
        """Map nothing new; existing mappings stay while they are held."""
        with self._lock:
            self._drop_fd()

    def _drop_fd(self) -> None:
        self._writing_fd = None
        if self._close_fd is not None:
            self._close_fd()

    def _writable(self) -> _WritablePages:
        pages = self._written
        if pages is not None:
            return pages
        with self._lock:
            if self._written is None:
                if self._writing_fd is None:
                    raise NodeUnavailable("the segment's owner lets this process map it for reading only")
                try:
                    area = map_shared(self._writing_fd, len(self.array), writable=True)
                    self._written = _WritablePages(area, self._read.area)
                except (OSError, InvalidRequest) as error:
                    raise NodeUnavailable(f"the segment cannot be mapped for writing: {error}") from error
                self._drop_fd()
            return self._written

    @property
    def writable_view(self) -> memoryview | None:
        """The segment's bytes for writing; None if this process may not write."""
        try:
            return self._writable().view
        except NodeUnavailable:
            return None

    def touch(self, offset: int, length: int) -> None:
        """Map the pages of a range about to be written, in one go."""
        self._writable().touch(offset, length)

    def copy(self, opcode: Opcode, local: Memory, local_offset: int, remote_offset: int, length: int) -> None:
        """Move the bytes now."""
        if opcode is _READ:
            copy(local, local_offset, self, remote_offset, length)
        else:
            pages = self._written or self._writable()
            pages.touch(remote_offset, length)
            copy(pages, remote_offset, local, local_offset, length)

    def copy_long(
        self,
        helper: CopyHelper,
        opcode: Opcode,
        local: Memory,
        local_offset: int,
        remote_offset: int,
        length: int,
        digest: Digest | None,
    ) -> None:
        """Do ``copy`` with the help of ``helper``."""
        if opcode is _READ:
            helper.copy(opcode, local, local_offset, self, remote_offset, length, digest)
        else:
            pages = self._writable()
            pages.touch(remote_offset, length)
            helper.copy(opcode, pages, remote_offset, local, local_offset, length, digest)

    def digest(self, offset: int, length: int) -> int:
        """Return the xxh3_64 of a range."""
        return digest_of(self.array[offset : offset + length].data)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)
_CALLS = {Opcode.READ: _LIBC.process_vm_readv, Opcode.WRITE: _LIBC.process_vm_writev}
for _call in _CALLS.values():
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        ctypes.c_int, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip


def may_trace(pid: int) -> bool:
    """Return whether the kernel would let this process read and write that one's memory."""
    byte = ctypes.c_char()
    local, remote = _Iovec(ctypes.addressof(byte), 1), _Iovec(0, 1)  # address 0 is unmapped: EFAULT if permitted
    ctypes.set_errno(0)
    _CALLS[Opcode.READ](pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return ctypes.get_errno() not in (errno.EPERM, errno.ESRCH, errno.ENOSYS)


class ProcessMemory:
    """The segment at ``address`` in the process ``pid``.

    Raises NodeUnavailable, from the constructor and from ``copy``, if the kernel denies access.
    """

    view: memoryview | None = None
    published: memoryview | None = None
    writable_view: memoryview | None = None

    def __init__(self, pid: int, address: int) -> None:
        self._pid, self._address = pid, address
        probe = ctypes.c_char()
        self._move(Opcode.READ, ctypes.addressof(probe), 0, 1)

    def copy(self, opcode: Opcode, local: Memory, local_offset: int, remote_offset: int, length: int) -> None:
        """Move the bytes now."""
        self._move(opcode, local.address + local_offset, remote_offset, length)

    def touch(self, offset: int, length: int) -> None:
        """Do nothing: no pages are mapped."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def digest(self, offset: int, length: int) -> int:
        """Return the xxh3_64 of a range, which is copied for it."""
        if length > _DIGEST_PIECE_BYTES:
            raise NodeUnavailable(
                f"a slice of {length} bytes is too long to be copied for its checksum; use smaller slices"
            )
        copied = ctypes.create_string_buffer(length)
        self._move(Opcode.READ, ctypes.addressof(copied), offset, length)
        return digest_of(memoryview(copied))

    def _move(self, opcode: Opcode, here: int, offset: int, length: int) -> None:
        done = 0
        while done < length:
            local = _Iovec(here + done, length - done)
            remote = _Iovec(self._address + offset + done, length - done)
            moved = _CALLS[opcode](self._pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if moved <= 0:
                error = os.strerror(ctypes.get_errno())
                raise NodeUnavailable(f"{_CALLS[opcode].__name__} of process {self._pid}: {error}")
            done += moved
