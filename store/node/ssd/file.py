"""The file under the SSD tier, and the aligned memory that its I/O goes through: blocking calls, made by threads.

Reads and writes bypass the page cache (O_DIRECT): otherwise the chunks would be in memory twice, once unaccounted for.
A file system that refuses direct I/O is used through the cache, with a line in the log. This module handles places,
lengths and heads; choosing the chunks to keep is ``tier_state``'s business.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from tanghulu.errors import ConfigError
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.state.ssd_record import (
    FILE_ID_BYTES,
    FORMAT,
    HEADER_BYTES,
    MAX_HEAD_BYTES,
    SUPERBLOCK_PLACES,
    UNIT,
    SsdRecord,
    decode_head,
    decode_superblock,
    encode_superblock,
    has_magic,
    tier_format,
)
from tanghulu.transfer_engine.core.segment import unmap
from tanghulu.types import format_size

_log = structlog.get_logger(__name__)

#: A size of more than this many times its file system can only be a mistake; a smaller one shrinks to the space there.
ABSURD = 16
#: Bytes of one read of a scan: the first unit for heads far apart, elsewhere everything.
_SPARSE_WINDOW = UNIT
_DENSE_WINDOW = 1 << 20
#: Longer records are skipped: reading them would take longer than the next request.
_FAR_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class IoBuffer:
    """Aligned memory for one record; return it to the arena it came from."""

    offset: int
    view: memoryview


class Arena:
    """Bounded aligned memory for I/O; used by the event loop alone.

    Pages are allocated by the system when first touched, or by ``populate``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._area = mmap.mmap(-1, capacity_bytes)
        self._view = memoryview(self._area)
        self._allocator = OffsetAllocator(capacity_bytes, UNIT)

    @property
    def capacity_bytes(self) -> int:
        """The length of the file."""
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in use by running operations."""
        return self._allocator.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest buffer available now."""
        return self._allocator.largest_free_bytes

    def take(self, size_bytes: int) -> IoBuffer | None:
        """Return a buffer of ``size_bytes`` (a multiple of the unit); None if there is no such piece."""
        offset = self._allocator.allocate(size_bytes)
        return None if offset is None else IoBuffer(offset, self._view[offset : offset + size_bytes])

    def give_back(self, buffer: IoBuffer) -> None:
        """Return a buffer that no I/O uses any more."""
        self._allocator.free(buffer.offset, len(buffer.view))
        buffer.view.release()

    def populate(self) -> None:
        """Allocate all pages from the system now, at 1 ms a MiB; to be called before anything else, in any thread."""
        np.frombuffer(self._area, np.uint8)[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Unmap; buffers of writes that a failing disk never completed keep their pages until they are dropped."""
        unmap(self._view, self._area)


class TierFile:
    """One open file, locked against a second node. ``offset`` always counts from behind the header."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open or create the file. Raises ConfigError if it is another user's or format's, in use, or unreadable."""
        self.path = path
        self.capacity_bytes = size_bytes // UNIT * UNIT - HEADER_BYTES
        self.direct = True
        self._wiped_area = mmap.mmap(-1, UNIT)  # zeros
        self._wiped = memoryview(self._wiped_area)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._compare_with_disk(size_bytes)
            self._fd = self._open()
            self.file_id = self._take_over()
        except OSError as error:
            raise ConfigError(f"cannot use {path} as SSD tier: {error.strerror or error}; choose another") from error

    def _compare_with_disk(self, size_bytes: int) -> None:
        """Raise ConfigError for a size that can only be a mistake, log one larger than the file system."""
        found = os.statvfs(self.path.parent)
        disk_bytes = found.f_blocks * found.f_frsize
        if not disk_bytes or size_bytes <= disk_bytes:
            return
        if size_bytes > disk_bytes * ABSURD:
            raise ConfigError(
                f"--ssd-size {format_size(size_bytes)}: the file system of {self.path} has {format_size(disk_bytes)}"
            )
        _log.warning(
            "tier.larger_than_its_disk",
            path=str(self.path),
            size_bytes=size_bytes,
            disk_bytes=disk_bytes,
            now="lives in what the disk gives",
        )

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            _log.warning("tier.no_direct_io", path=str(self.path), error=str(error), now="through the page cache")
            fd = os.open(self.path, flags, 0o600)
        try:
            self._keep_private(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:  # an interrupt, too: nobody else knows the descriptor; re-raised
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"{self.path} is the SSD tier of another node; give each node a file of its own"
                ) from None
            raise
        return fd

    def _keep_private(self, fd: int) -> None:
        """Refuse a file of another user; make one of this user's unreadable for others."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.path} is not a file of user {os.geteuid()}, and an SSD tier holds chunks in clear text: "
                "choose a file of this user's, or one that does not exist yet"
            )
        if found.st_mode & 0o177:
            os.fchmod(fd, 0o600)
            _log.warning("tier.mode_narrowed", path=str(self.path), mode=f"{stat.S_IMODE(found.st_mode):04o}")

    def _take_over(self) -> bytes:
        """Return the id of the file. One damaged superblock is rewritten; without any the file starts empty."""
        units = [self._read_superblock(place) for place in SUPERBLOCK_PLACES]
        ids = [None if unit is None else decode_superblock(unit) for unit in units]
        file_id = next((each for each in ids if each is not None), None)
        if file_id is None:
            self._refuse_others(units)
            if any(units):
                _log.error("tier.superblock_damaged", path=str(self.path), now="starts empty")
            file_id = secrets.token_bytes(FILE_ID_BYTES)
            os.ftruncate(self._fd, 0)
            self._write_superblocks(file_id)
        elif any(each != file_id for each in ids):
            _log.error("tier.superblock_damaged", path=str(self.path), now="goes by its copy, and writes it again")
            try:
                self._write_superblocks(file_id)
            except OSError as error:
                _log.error("tier.superblock_not_written", path=str(self.path), error=str(error))
        return file_id

    def _read_superblock(self, place: int) -> bytes | None:
        """Return the unit there, empty behind the file's end; None if it cannot be read."""
        unit = mmap.mmap(-1, UNIT)  # unmapped with the last reference, which may be the error of a read
        try:
            return unit[: os.preadv(self._fd, [unit], place)]
        except OSError as error:
            _log.error("tier.superblock_unreadable", path=str(self.path), place=place, error=str(error))
            return None

    def _refuse_others(self, units: Sequence[bytes | None]) -> None:
        """Raise ConfigError unless the file is new, or a tier of this format with damaged superblocks."""
        formats = [tier_format(unit) for unit in units if unit and unit.strip(b"\0")]
        others = [each for each in formats if each is not None]
        why = None
        if None in units:
            why = "cannot be read where its superblocks are; name a new file, or remove it"
        elif formats and not others:
            why = "is not an SSD tier of tanghulu; name a new file, or remove it"
        elif others and FORMAT not in others:
            why = (
                f"is an SSD tier of format {others[0]}, and this release reads format {FORMAT}: another release has "
                "written it; its chunks are copies that can be had again, so remove it, or name a new file"
            )
        if why is not None:
            os.close(self._fd)
            raise ConfigError(f"{self.path} {why}")

    def _write_superblocks(self, file_id: bytes) -> None:
        unit = mmap.mmap(-1, UNIT)
        unit[:] = encode_superblock(file_id)
        for place in SUPERBLOCK_PLACES:
            _all(os.pwritev, self._fd, memoryview(unit), place)
        self.sync()

    # --- one record

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of ``view`` (aligned). Raises OSError."""
        _all(os.pwritev, self._fd, view, HEADER_BYTES + offset)

    def read(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` (aligned). Raises OSError, also if the file ends before."""
        _all(os.preadv, self._fd, view, HEADER_BYTES + offset)

    def wipe(self, offset: int) -> None:
        """Make the record at ``offset`` unfindable. Raises OSError."""
        _all(os.pwritev, self._fd, self._wiped, HEADER_BYTES + offset)

    def sync(self) -> None:
        """Make written records survive a loss of power."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close and unlock."""
        os.close(self._fd)
        unmap(self._wiped, self._wiped_area)  # the error of a wipe that failed may still show its slice of it

    # --- everything

    def scan(self) -> Iterator[tuple[int, SsdRecord]]:
        """Yield (offset, record) of the file's contents, by their heads; values are verified when they are read.

        Reads heads only, and whole holes: after a head it continues behind the record. Raises OSError.
        """
        with memoryview(mmap.mmap(-1, _DENSE_WINDOW)) as view:
            end, position, length = min(self.capacity_bytes, self._length()), 0, _DENSE_WINDOW
            while (position := self._next_data(position)) < end:
                length = min(length, end - position)
                num_read = os.preadv(self._fd, [view[:length]], HEADER_BYTES + position)
                if num_read <= 0:
                    return
                found, position = self._scan_window(view[:num_read], position, is_last=position + num_read >= end)
                yield from found
                is_sparse = bool(found) and found[-1][1].record_bytes > _FAR_BYTES
                length = _SPARSE_WINDOW if is_sparse else _DENSE_WINDOW

    def _scan_window(self, view: memoryview, begin: int, *, is_last: bool) -> tuple[list[tuple[int, SsdRecord]], int]:
        """Return the records that begin in ``view``, and the next position; a truncated head begins the next window."""
        found: list[tuple[int, SsdRecord]] = []
        at = 0
        while at < len(view):
            if not has_magic(view, at):
                at += UNIT
                continue
            record = decode_head(view[at : at + MAX_HEAD_BYTES], begin + at, self.file_id)
            if record is not None:
                found.append((begin + at, record))
                at += record.record_bytes
            elif len(view) - at < MAX_HEAD_BYTES and not is_last and (at or len(view) < _DENSE_WINDOW):
                break
            else:
                at += UNIT
        return found, begin + at

    def _length(self) -> int:
        return os.fstat(self._fd).st_size - HEADER_BYTES

    def unbacked(self) -> list[tuple[int, int]]:
        """Return (offset, length) of all units without room on the disk yet; nothing if that is unknown."""
        found: list[tuple[int, int]] = []
        position = 0
        with contextlib.suppress(OSError):
            while position < self.capacity_bytes:
                begin = self._seek(position, os.SEEK_HOLE)
                position = min(self._seek(begin, os.SEEK_DATA), self.capacity_bytes)
                begin, end = -(-begin // UNIT) * UNIT, position // UNIT * UNIT
                if begin < end:
                    found.append((begin, end - begin))
        return found

    def _seek(self, offset: int, whence: int) -> int:
        """Return the next start of data or of a hole; the end if there is none."""
        try:
            return os.lseek(self._fd, HEADER_BYTES + offset, whence) - HEADER_BYTES
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return offset if whence == os.SEEK_HOLE else self.capacity_bytes

    def _next_data(self, position: int) -> int:
        """Skip ranges that were never written."""
        return max(self._seek(position, os.SEEK_DATA), position) // UNIT * UNIT


def _all(call: object, fd: int, view: memoryview, position: int) -> None:
    """Repeat ``call`` (preadv or pwritev) until the whole view is done; direct I/O moves whole units."""
    assert callable(call)
    done = 0
    while done < len(view):
        num_bytes = call(fd, [view[done:]], position + done)
        if num_bytes <= 0:
            raise OSError(errno.EIO, f"{num_bytes} of {len(view) - done} bytes at {position + done}")
        done += num_bytes
