"""Long copies through mapped memory: an idle helper takes a part, and a digest runs along.

One core moves 7 GB/s here, two move 11, and a checksum that reads the bytes again when all of them have moved finds
them in memory instead of a cache. So a copy of at least ``LONG_BYTES`` is cut. The caller takes pieces from the front
and shows each to the digest; a helper (a thread that waits for nothing else) takes a large part from the back, in a
single call: with a call per piece, each would wait for the other's turn at the interpreter. Nobody waits for the helper
to start: if it is busy, or wakes too late, the caller does it all. Several callers at once have no helper: they use the
cores themselves.

The digest needs the bytes in order. For a WRITE it is shown the source, which does not depend on the copy, so the
caller need not wait for the helper before it shows the helper's part, and leaves more to it. For a READ it is shown the
bytes that have arrived.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol

from tanghulu.transfer_engine.core.buffers import Memory, copy
from tanghulu.transfer_engine.core.slices import Opcode

#: Length from which a copy is cut. A helper needs some 50 us to wake, in which 400 KiB are copied.
LONG_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
#: Helper's share of the remaining bytes: if the caller only copies, or feeds a digest after all has arrived; and if it
#: feeds one meanwhile.
_HALF, _MOST = 1 / 2, 3 / 4


class Digest(Protocol):
    """Computes a digest of bytes shown to it in order, as ``store.protocol.checksums.RunningChecksums`` does."""

    def add(self, piece: memoryview) -> None:
        """Show it the next bytes."""

    def void(self) -> None:
        """Forget the bytes shown so far: they may have been overwritten since, or are incomplete."""


class LongCopy:
    """One copy in parts, of which caller and helper each take some; the caller has checked its bounds."""

    def __init__(
        self, to: Memory, to_offset: int, source: Memory, source_offset: int, length: int, share: float
    ) -> None:
        self._memories: tuple[Memory, Memory] | None = (to, source)
        self._to_offset, self._source_offset = to_offset, source_offset
        self._share = share
        self._lock = threading.Lock()
        self._helping = threading.Lock()
        self._front, self._back = 0, length  # not yet taken

    def copy_front(self, share: float = 0.0) -> tuple[int, int] | None:
        """Copy the next piece, or ``share`` of the remainder if that is more.

        Returns its (begin, end), or None if nothing is left to take.
        """
        with self._lock:
            begin = self._front
            length = max(int((self._back - begin) * share), PIECE_BYTES)
            end = self._front = min(begin + length, self._back)
        if begin == end:
            return None
        self._move(begin, end)
        return begin, end

    def help(self) -> None:
        """Copy a large part from the back, and again, until less than a piece is left."""
        with self._helping:
            while (part := self._take_back()) is not None:
                self._move(*part)

    def _take_back(self) -> tuple[int, int] | None:
        with self._lock:
            share = int((self._back - self._front) * self._share) // PIECE_BYTES * PIECE_BYTES
            self._back -= share
            return (self._back, self._back + share) if share else None

    def end(self) -> None:
        """End the copy: when this returns, or raises, nobody copies any more, nor holds the memory."""
        with self._lock:
            self._back = self._front
        _pass(self._helping)
        self._memories = None

    def _move(self, begin: int, end: int) -> None:
        assert self._memories is not None
        to, source = self._memories
        copy(to, self._to_offset + begin, source, self._source_offset + begin, end - begin)


def _pass(guard: threading.Lock) -> None:
    """Wait until the holder of ``guard`` is done, even if a signal's handler raises meanwhile; re-raises that."""
    try:
        guard.acquire()
    except BaseException:  # including Ctrl-C: memory must not be given back under a copy; re-raised
        _pass(guard)
        raise
    guard.release()  # a helper waking only now finds nothing to do


class CopyHelper:
    """A thread that helps with one long copy at a time, started with the first. Any thread may use it."""

    def __init__(self, *, wanted: bool) -> None:
        self._free = threading.Lock()
        self._works: SimpleQueue[LongCopy | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wanted = wanted
        self._lock = threading.Lock()
        self._num_callers = 0

    def copy(
        self,
        opcode: Opcode,
        to: Memory,
        to_offset: int,
        source: Memory,
        source_offset: int,
        length: int,
        digest: Digest | None,
    ) -> None:
        """Copy ``length`` bytes. ``digest`` has then been shown all of them, on the local side."""
        with self._lock:
            alone, self._num_callers = not self._num_callers, self._num_callers + 1
        try:
            if digest is None:
                work = LongCopy(to, to_offset, source, source_offset, length, _HALF)
                self._copy(work, helped=alone)
            else:
                local, at = (source, source_offset) if opcode is Opcode.WRITE else (to, to_offset)
                shown = local.array[at : at + length].data
                share = _MOST if opcode is Opcode.WRITE else _HALF
                work = LongCopy(to, to_offset, source, source_offset, length, share)
                self._copy_shown(work, opcode, shown, digest, helped=alone)
        finally:
            with self._lock:
                self._num_callers -= 1

    def _copy(self, work: LongCopy, *, helped: bool) -> None:
        """Copy in few calls: each waits for the interpreter afterwards."""
        try:
            share = _HALF if helped and self._recruit(work) else 1.0
            while work.copy_front(share) is not None:
                pass
        finally:
            work.end()

    def _copy_shown(self, work: LongCopy, opcode: Opcode, shown: memoryview, digest: Digest, *, helped: bool) -> None:
        """Copy in pieces, which the digest finds in the cache."""
        position, length = 0, len(shown)
        try:
            if helped:
                self._recruit(work)
            while (part := work.copy_front()) is not None:
                begin, position = part
                digest.add(shown[begin:position])
            if opcode is Opcode.WRITE and position < length:
                digest.add(shown[position:])
                position = length
        finally:
            work.end()
        if position < length:
            digest.add(shown[position:])

    def _recruit(self, work: LongCopy) -> bool:
        """Have the thread help, unless it is still busy with an earlier copy."""
        if not self._wanted or not self._free.acquire(blocking=False):
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tanghulu-copy", daemon=True)
            self._thread.start()
        self._works.put(work)
        return True

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.help()
            self._free.release()

    def close(self) -> None:
        """Take no more work; work under way ends."""
        self._works.put(None)
