"""Checksums of chunks: xxh3_64 over runs of ``part_bytes``, so that a layer can be verified as it arrives.

Owns the one way to compute and to verify them; writers, readers and the node's scrubbing all come here. A value of
10 bytes with part_bytes=4 has three parts of 4, 4 and 2 bytes; part_bytes=0 means one part over the whole value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tanghulu.errors import ChecksumMismatch, InvalidRequest

_xxh3_64 = xxhash.xxh3_64_intdigest

MAX_PARTS = 4096


class Checksums(NamedTuple):
    """``parts[i]`` is xxh3_64 of bytes ``[i * part_bytes, (i + 1) * part_bytes)``; no parts: nothing to verify."""

    part_bytes: int = 0
    parts: tuple[int, ...] = ()


NO_CHECKSUMS = Checksums()


def compute(value: memoryview | bytes, part_bytes: int = 0) -> Checksums:
    """Checksums of ``value``; raises InvalidRequest for more than ``MAX_PARTS`` parts."""
    size = len(value)
    if part_bytes <= 0 or part_bytes >= size:
        return Checksums(0, (_xxh3_64(value),))
    if size > part_bytes * MAX_PARTS:
        raise InvalidRequest(f"part_bytes={part_bytes} cuts {size} bytes into more than {MAX_PARTS} parts")
    view = memoryview(value)
    return Checksums(part_bytes, tuple(_xxh3_64(view[i : i + part_bytes]) for i in range(0, size, part_bytes)))


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
    """Whether ``value`` is what ``checksums`` were computed from; True if there are none."""
    parts = checksums.parts
    if not parts:
        return True
    if len(parts) == 1:
        return bool(_xxh3_64(value) == parts[0])
    step = checksums.part_bytes
    view = memoryview(value)
    return all(_xxh3_64(view[i * step : (i + 1) * step]) == part for i, part in enumerate(parts))


def covering(checksums: Checksums, size_bytes: int, begin: int, end: int) -> tuple[int, int]:
    """The least part of a value of ``size_bytes`` around ``[begin, end)`` that can be verified by itself."""
    if not checksums.parts:
        return begin, end
    step = checksums.part_bytes
    if len(checksums.parts) == 1 or not step:
        return 0, size_bytes
    return begin // step * step, min(-(-end // step) * step, size_bytes)


def matches_from(value: memoryview | bytes, checksums: Checksums, begin: int) -> bool:
    """``matches`` for the part of a value that begins at ``begin`` and that ``covering`` gave."""
    if len(checksums.parts) <= 1:
        return matches(value, checksums)
    step = checksums.part_bytes
    first = begin // step
    count = -(-len(value) // step)
    return matches(value, Checksums(step, checksums.parts[first : first + count]))


def compute_joined(pieces: Sequence[memoryview], part_bytes: int = 0) -> Checksums:
    """``compute`` for a value that lies in several pieces, without joining them."""
    size = sum(map(len, pieces))
    step = part_bytes if 0 < part_bytes < size else size
    if size > step * MAX_PARTS:
        raise InvalidRequest(f"part_bytes={part_bytes} cuts {size} bytes into more than {MAX_PARTS} parts")
    parts: list[int] = []
    digest, room = xxhash.xxh3_64(), step
    for piece in pieces:
        left = piece
        while left:
            digest.update(left[:room])
            taken = min(len(left), room)
            left, room = left[taken:], room - taken
            if not room:
                parts.append(digest.intdigest())
                digest, room = xxhash.xxh3_64(), step
    if room < step:
        parts.append(digest.intdigest())
    return Checksums(step if step < size else 0, tuple(parts))


def verify(value: memoryview | bytes, checksums: Checksums, key: str) -> None:
    """Raise ChecksumMismatch, naming ``key``, if ``value`` is not what was put."""
    if not matches(value, checksums):
        raise ChecksumMismatch(f"the {len(value)} bytes that arrived for {key!r} are not the bytes that were put")
