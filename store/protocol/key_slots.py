"""The slots that keys hash into: the unit in which nodes report what they hold and a master comes to know it.

There is a fixed number of them, the same in every process of a cluster. A node tells the slots in order, from 0 on; a
slot is known when every node has told it, so one number, how many slots are known, says of every key whether a master
may call it missing.

Sixteen slots in a row are a range. A master keeps the keys of each range apart from those of all others.

Example: ``slot_of("kv/a")`` is 812 everywhere, and its range 50. A master to whom all nodes have told the slots 0 to
899 knows whether "kv/a" is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

NUM_SLOTS = 1024
NUM_RANGES = 64
RANGE_SLOTS = NUM_SLOTS // NUM_RANGES
ALL_RANGES = frozenset(range(NUM_RANGES))
#: The same as one number, a bit for each range.
ALL_BITS = (1 << NUM_RANGES) - 1


def slot_of(key: str) -> int:
    """The slot of ``key``, 0 to NUM_SLOTS - 1: the low bits of XXH3-64 of its UTF-8 bytes."""
    return xxh3_64_intdigest(key.encode()) & (NUM_SLOTS - 1)


def range_of(key: str) -> int:
    """The range of ``key``, 0 to NUM_RANGES - 1: that of its slot."""
    return (xxh3_64_intdigest(key.encode()) & (NUM_SLOTS - 1)) // RANGE_SLOTS


def ranges_of(keys: Iterable[str]) -> list[int]:
    """The range of each of ``keys``; for many, in two thirds of the time."""
    return [(xxh3_64_intdigest(key.encode()) & (NUM_SLOTS - 1)) // RANGE_SLOTS for key in keys]


def bits_of(numbers: Iterable[int]) -> int:
    """Ranges as one number: a bit for each."""
    return sum(1 << number for number in set(numbers))


@functools.lru_cache(maxsize=NUM_SLOTS + 1)
def known_below(num_slots: int) -> bytes:
    """Of each range how many of its slots, from the first on, are among the first ``num_slots`` of all."""
    return bytes(min(max(num_slots - number * RANGE_SLOTS, 0), RANGE_SLOTS) for number in range(NUM_RANGES))
