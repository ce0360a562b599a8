"""Checksums of chunks: xxh3_64 over runs of ``part_bytes``, so that a layer can be verified as it arrives.

Owns the one way to compute and to verify them; writers, readers and the node's scrubbing all use it. A value of 10
bytes with part_bytes=4 has three parts of 4, 4 and 2 bytes; part_bytes=0 means one part over the whole value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from tanghulu.errors import ChecksumMismatch, InvalidRequest
from tanghulu.rpc.wire import U64, FastMessage

_xxh3_64 = xxhash.xxh3_64_intdigest

MAX_PARTS = 4096


class Checksums(FastMessage, frozen=True):
    """``parts[i]`` is xxh3_64 of bytes ``[i * part_bytes, (i + 1) * part_bytes)``; no parts: nothing to verify."""

    part_bytes: U64 = 0
    parts: Annotated[tuple[U64, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()


NO_CHECKSUMS = Checksums()


def compute(value: memoryview | bytes, part_bytes: int = 0) -> Checksums:
    """Return checksums of ``value``; raises InvalidRequest for more than ``MAX_PARTS`` parts."""
    size = len(value)
    step = part_length(size, part_bytes)
    if step == size:
        return Checksums(0, (_xxh3_64(value),))
    view = memoryview(value)
    return Checksums(part_bytes, tuple(_xxh3_64(view[i : i + part_bytes]) for i in range(0, size, part_bytes)))


def part_length(size_bytes: int, part_bytes: int) -> int:
    """Return the length of a value's parts (the last may be shorter); raises InvalidRequest for too many parts."""
    if part_bytes <= 0 or part_bytes >= size_bytes:
        return size_bytes
    if size_bytes > part_bytes * MAX_PARTS:
        raise InvalidRequest(
            f"part_bytes={part_bytes} cuts {size_bytes} bytes into more than {MAX_PARTS} parts; raise part_bytes"
        )
    return part_bytes


def validate(checksums: Checksums, size_bytes: int) -> None:
    """Raise InvalidRequest if ``checksums`` cannot belong to a value of ``size_bytes``."""
    if not checksums.parts:
        return
    step = checksums.part_bytes or max(size_bytes, 1)
    expected = -(-size_bytes // step)
    if len(checksums.parts) != expected or expected > MAX_PARTS:
        raise InvalidRequest(
            f"{len(checksums.parts)} checksums of {checksums.part_bytes} bytes each do not cover {size_bytes} bytes"
        )


def matches(value: memoryview | bytes, checksums: Checksums) -> bool:
    """Return whether ``value`` matches ``checksums``; True if there are none."""
    parts = checksums.parts
    if not parts:
        return True
    if len(parts) == 1:
        return bool(_xxh3_64(value) == parts[0])
    step = checksums.part_bytes
    view = memoryview(value)
    return all(_xxh3_64(view[i * step : (i + 1) * step]) == part for i, part in enumerate(parts))


def covering(checksums: Checksums, size_bytes: int, begin: int, end: int) -> tuple[int, int]:
    """Return the least part of a value of ``size_bytes`` around ``[begin, end)`` that can be verified by itself."""
    if not checksums.parts:
        return begin, end
    step = checksums.part_bytes
    if len(checksums.parts) == 1 or not step:
        return 0, size_bytes
    return begin // step * step, min(-(-end // step) * step, size_bytes)


def matches_from(value: memoryview | bytes, checksums: Checksums, begin: int) -> bool:
    """Return ``matches`` for the part of a value that begins at ``begin`` and was chosen by ``covering``."""
    if len(checksums.parts) <= 1:
        return matches(value, checksums)
    step = checksums.part_bytes
    count = -(-len(value) // step)
    return matches(value, Checksums(step, _parts_from(checksums, begin, count)))


def are_from(computed: Checksums, checksums: Checksums, begin: int) -> bool:
    """Return ``matches_from`` for a part whose checksums were ``computed`` on arrival."""
    return computed.parts == _parts_from(checksums, begin, len(computed.parts))


def _parts_from(checksums: Checksums, begin: int, count: int) -> tuple[int, ...]:
    first = begin // checksums.part_bytes if checksums.part_bytes else 0
    return checksums.parts[first : first + count]


class RunningChecksums:
    """``compute`` for a value of ``size_bytes`` added piece by piece; raises InvalidRequest likewise.

    A transfer engine's copies can use it as their digest.
    """

    def __init__(self, size_bytes: int, part_bytes: int = 0) -> None:
        step = part_length(size_bytes, part_bytes)
        self._part_bytes = step if step < size_bytes else 0
        self._size_bytes = size_bytes
        self._step = self._room = step
        self._parts: list[int] = []
        self._digest = xxhash.xxh3_64()
        self.num_added = 0
        self._void = False

    @property
    def complete(self) -> bool:
        """Whether all of the value was added."""
        return self.num_added == self._size_bytes and not self._void

    def void(self) -> None:
        """Discard the added bytes as not the value's; it is never ``complete``."""
        self._void = True

    def add(self, piece: memoryview) -> None:
        """Add the next bytes."""
        self.num_added += len(piece)
        if len(piece) < self._room:  # the most frequent case
            self._digest.update(piece)
            self._room -= len(piece)
            return
        while piece:
            self._digest.update(piece[: self._room])
            taken = min(len(piece), self._room)
            piece, self._room = piece[taken:], self._room - taken
            if not self._room:
                self._close_part()

    def _close_part(self) -> None:
        self._parts.append(self._digest.intdigest())
        self._digest, self._room = xxhash.xxh3_64(), self._step

    def end(self) -> Checksums:
        """End the computation, after the last byte was added."""
        if self._room < self._step or not self._parts:
            self._close_part()
        return Checksums(self._part_bytes, tuple(self._parts))


class Rest:
    """Checksums that already cover the beginning of their value: fed all of it, they add only the rest."""

    def __init__(self, running: RunningChecksums) -> None:
        self.running = running
        self.num_shown = 0

    def add(self, piece: memoryview) -> None:
        """Feed the value from its beginning, piece by piece."""
        known = max(self.running.num_added - self.num_shown, 0)
        self.num_shown += len(piece)
        if known < len(piece):
            self.running.add(piece[known:] if known else piece)

    def void(self) -> None:
        """See RunningChecksums."""
        self.running.void()


def compute_joined(pieces: Sequence[memoryview], part_bytes: int = 0) -> Checksums:
    """Return ``compute`` for a value in several pieces, without joining them."""
    running = RunningChecksums(sum(map(len, pieces)), part_bytes)
    for piece in pieces:
        running.add(piece)
    return running.end()


def verify(value: memoryview | bytes, checksums: Checksums, key: str) -> None:
    """Raise ChecksumMismatch, naming ``key``, if ``value`` does not match."""
    if not matches(value, checksums):
        raise ChecksumMismatch(f"the {len(value)} bytes for {key!r} do not match the checksums of the put")
