"""The intended owner of each range of keys: a pure function of the live masters.

Rendezvous hashing (HRW): every pair of a range and a master has a weight, the hash of both, and the heaviest pairs come
first. A master takes floor(64 / n) ranges, and 64 mod n of the masters take one more, so none has two more than
another; a range whose heaviest master is full goes to its next. Everyone with the same ids computes the same answer.

Example: with the masters a, b and c two have 21 ranges and one 22. d joins: it gets 16, most of them from all three
alike, and a few further ranges change hands among a, b and c since their shares have become smaller. d leaves: each
range is back with its former owner.

The *standby* of a range is the master that should own it if its owner were lost, so a range taken over by its standby
need not be moved again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from tanghulu.store.protocol.key_slots import NUM_RANGES

#: Sets of masters whose assignments are cached: the current ones with each of them lost, and the previous ones.
_MAX_REMEMBERED = 256


def assign(ids: Iterable[str]) -> tuple[str, ...]:
    """Return the master that should own each range, of those with ``ids``; empty without any."""
    return _assign(tuple(sorted(set(ids))))


def standbys(ids: Iterable[str], owners: Sequence[str]) -> tuple[str, ...]:
    """Return the standby of each range owned as in ``owners``, of the masters with ``ids``; "" if there is none."""
    masters = frozenset(ids)
    left = {owner: assign(masters - {owner}) for owner in set(owners)}
    return tuple(left[owner][number] if left[owner] else "" for number, owner in enumerate(owners))


@lru_cache(_MAX_REMEMBERED)
def _assign(ids: tuple[str, ...]) -> tuple[str, ...]:
    if not ids:
        return ()
    share, num_larger = divmod(NUM_RANGES, len(ids))
    owners = [""] * NUM_RANGES
    num_owned = dict.fromkeys(ids, 0)
    pairs = [(_weight(number, each), number, each) for number in range(NUM_RANGES) for each in ids]
    for _, number, each in sorted(pairs, reverse=True):
        if owners[number]:
            continue
        is_larger = num_owned[each] == share and num_larger > 0
        if num_owned[each] < share or is_larger:
            num_larger -= is_larger
            num_owned[each] += 1
            owners[number] = each
    return tuple(owners)


def _weight(number: int, master_id: str) -> int:
    return xxh3_64_intdigest(f"{number:02d}/{master_id}".encode())
