"""The slots that keys hash into: the unit in which nodes report their chunks and a master learns of them.

Their number is fixed, the same in every process of a cluster. A node reports the slots in order, from 0 on; a slot is
known when every node has reported it, so one number, that of known slots, decides for every key whether a master may
call it missing.

Sixteen consecutive slots are a range. A master keeps the keys of each range separate from those of all others.

Example: ``slot_of("kv/a")`` is 812 everywhere, and its range 50. A master that has reports of the slots 0 to 899 from
all nodes knows whether "kv/a" is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

NUM_SLOTS = 1024
NUM_RANGES = 64
RANGE_SLOTS = NUM_SLOTS // NUM_RANGES
ALL_RANGES = frozenset(range(NUM_RANGES))
#: The same as one number, a bit for each range.
ALL_BITS = (1 << NUM_RANGES) - 1


def slot_of(key: str) -> int:
    """Return the slot of ``key``, 0 to NUM_SLOTS - 1: the low bits of XXH3-64 of its UTF-8 bytes."""
    return xxh3_64_intdigest(key.encode()) & (NUM_SLOTS - 1)


def range_of(key: str) -> int:
    """Return the range of ``key``, 0 to NUM_RANGES - 1: that of its slot."""
    return (xxh3_64_intdigest(key.encode()) & (NUM_SLOTS - 1)) // RANGE_SLOTS


def ranges_of(keys: Iterable[str]) -> list[int]:
    """Return the range of each of ``keys``; for many, in two thirds of the time."""
    return [(xxh3_64_intdigest(key.encode()) & (NUM_SLOTS - 1)) // RANGE_SLOTS for key in keys]


def bits_of(numbers: Iterable[int]) -> int:
    """Return ranges as one number: a bit for each."""
    return sum(1 << number for number in set(numbers))
