"""S3-FIFO (Yang et al., SOSP'23, https://dl.acm.org/doi/10.1145/3600006.3613147).

Three queues. New keys enter a small one, a tenth of all. A key leaving it unread is evicted and remembered as a ghost;
a read one moves to the main queue, and a returning ghost enters there at once. The main queue is a clock: each key
counts up to three reads, and one that reaches the front with a count loses one and restarts at the back.

Example: ten keys, all new, k3 was read. The small queue may hold one: k0 is evicted (now a ghost). Later k3 reaches its
front and moves to the main queue, and k4 is evicted. If k0 is put again it enters the main queue.

The capacity is unknown here: the target of the small queue and the limit of ghosts follow the number of keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.eviction.base import Policy
from tanghulu.types import ChunkKey

MAX_READS = 3
#: The small queue's share of all keys is one in this many; ghosts may equal the rest in number.
SMALL_SHARE = 10


class S3Fifo(Policy):
    """Evicts new keys that are not read soon; gives keys that were read more time."""

    name = "s3-fifo"

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, int] = OrderedDict()  # key -> reads
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    @property
    def num_ghosts(self) -> int:
        """Number of ghosts, at most the number of resident keys plus one."""
        return len(self._ghosts)

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key``: to the main queue if recently evicted, else to the small one."""
        assert key not in self, f"{key!r} was added before"
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: ChunkKey) -> bool:
        """Give ``key`` one more life, up to three."""
        queue = self._small if key in self._small else self._main
        reads = queue.get(key)
        if reads is None:
            return False
        queue[key] = min(reads + 1, MAX_READS)
        return True

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key``; one evicted from the small queue stays as a ghost."""
        if evicted and key in self._small:
            self._promote_before(key)
            self._remember(key)
        elif evicted:
            self._promote_excess()
            self._turn_main()
        (self._small if key in self._small else self._main).pop(key)
        self._trim_ghosts()

    def _remember(self, key: ChunkKey) -> None:
        self._ghosts.pop(key, None)
        self._ghosts[key] = None

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > max(1, len(self) + 1 - self._small_target()):
            self._ghosts.popitem(last=False)

    def _promote_before(self, key: ChunkKey) -> None:
        """Promote read keys that precede ``key`` in the small queue; unread ones there were leased."""
        passed = []
        for each, reads in self._small.items():
            if each == key:
                break
            if reads:
                passed.append(each)
        for each in passed:
            self._promote(each)

    def _promote_excess(self) -> None:
        while len(self._small) > self._small_target():
            first, reads = next(iter(self._small.items()))
            if not reads:
                return
            self._promote(first)

    def _promote(self, key: ChunkKey) -> None:
        del self._small[key]
        self._main[key] = 0

    def _turn_main(self) -> None:
        """Turn the main queue until its front has no life left: the victim, or a leased key."""
        while True:
            first, reads = next(iter(self._main.items()))
            if not reads:
                return
            self._main[first] = reads - 1
            self._main.move_to_end(first)

    def _small_target(self) -> int:
        return max(1, len(self) // SMALL_SHARE)

    def victims(self) -> Iterator[ChunkKey]:
        """Yield the small queue's unread surplus, then the main queue by reads, then the rest."""
        excess = len(self._small) - self._small_target() if self._main else len(self._small)
        promoted: list[ChunkKey] = []
        rest: list[ChunkKey] = []
        small = iter(self._small.items())
        for key, reads in small:
            if excess <= 0 and (self._main or promoted):
                rest.append(key)
                break
            excess -= 1
            if reads:
                promoted.append(key)
            else:
                yield key
        for wanted in range(MAX_READS + 1):
            yield from (key for key, reads in self._main.items() if reads == wanted)
            if wanted == 0:
                yield from promoted
        yield from rest
        yield from (key for key, _ in small)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._small or key in self._main

    def check(self) -> None:
        """Assert that each key is in one queue and that ghosts are bounded."""
        assert not self._small.keys() & self._main.keys()
        assert not self._ghosts.keys() & (self._small.keys() | self._main.keys())
        assert len(self._ghosts) <= len(self) + 1
        assert all(0 <= reads <= MAX_READS for reads in (*self._small.values(), *self._main.values()))

    def __repr__(self) -> str:
        return f"S3Fifo({len(self._small)} small, {len(self._main)} main, {len(self._ghosts)} ghosts)"
