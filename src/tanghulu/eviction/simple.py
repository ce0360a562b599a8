"""The policies without ghosts: FIFO and LRU, LFU, and SIEVE."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from tanghulu.eviction.base import Policy
from tanghulu.parted_dict import PartedDict
from tanghulu.types import ChunkKey

#: Chunks read more often count as equally hot.
MAX_COUNT = 255


class _Place(msgspec.Struct, eq=False, gc=False):
    """The neighbours of a key; None at either end."""

    before: ChunkKey | None
    after: ChunkKey | None


class Ordered(Policy):
    """Keys in a list, which is the order of eviction. Subclasses define the effect of ``touch`` on it.

    Each key stores its neighbours' names. An OrderedDict does the same in C, but pauses for 0.1 s whenever it grows at
    half a million keys.
    """

    name = ""

    def __init__(self) -> None:
        self._places = PartedDict[ChunkKey, _Place]()
        self._first: ChunkKey | None = None
        self._last: ChunkKey | None = None

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key`` at the most recently used end."""
        assert key not in self._places, f"{key!r} was added before"
        self._places[key] = _Place(self._last, None)
        if self._last is None:
            self._first = key
        else:
            self._places[self._last].after = key
        self._last = key

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key``."""
        place = self._places[key]
        before, after = place.before, place.after
        del self._places[key]
        if before is None:
            self._first = after
        else:
            self._places[before].after = after
        if after is None:
            self._last = before
        else:
            self._places[after].before = before

    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys in eviction order."""
        key = self._first
        while key is not None:
            after = self._places[key].after
            yield key
            key = after

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._places

    def check(self) -> None:
        """Assert that the list is consistent in both directions."""
        self._places.check()
        num_keys, before = 0, None
        for key in Ordered.victims(self):  # a subclass may have another order of eviction
            assert self._places[key].before == before
            num_keys, before = num_keys + 1, key
        assert num_keys == len(self._places)
        assert self._last == before


class Fifo(Ordered):
    """First in, first out: evicts the key added longest ago.

    The cheapest order, blind to reads. Useful if every chunk is read about once.
    """

    name = "fifo"

    def touch(self, key: ChunkKey) -> bool:
        """Ignore the read."""
        return key in self._places


class Lru(Ordered):
    """Least recently used: evicts the key added or touched longest ago.

    With a request's blocks touched tail first it evicts leaves before the prefix they depend on.
    """

    name = "lru"

    def touch(self, key: ChunkKey) -> bool:
        """Make ``key`` the most recently used."""
        if key not in self._places:
            return False
        if key != self._last:
            self.remove(key, evicted=False)
            self.add(key, 0)
        return True


class Lfu(Policy):
    """Least frequently used, the least recently used first among equals.

    Counts stop at a limit, and end with their chunk. Good for a fixed set of hot prefixes; bad if popularity changes,
    because once-hot keys stay for long.

    One LRU order for each count of reads; the lowest non-empty one gives the victim.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, int] = {}
        self._orders: list[OrderedDict[ChunkKey, None]] = [OrderedDict() for _ in range(MAX_COUNT + 1)]
        self._lowest = 0  # all orders below it are empty

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key`` with no reads."""
        assert key not in self._counts, f"{key!r} was added before"
        self._counts[key] = 0
        self._orders[0][key] = None
        self._lowest = 0

    def touch(self, key: ChunkKey) -> bool:
        """Count one more read."""
        count = self._counts.get(key)
        if count is None:
            return False
        if count == MAX_COUNT:
            self._orders[count].move_to_end(key)
        else:
            del self._orders[count][key]
            self._orders[count + 1][key] = None
            self._counts[key] = count + 1
        return True

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key`` and its count."""
        del self._orders[self._counts.pop(key)][key]

    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys by their counts, equal ones from the least to the most recently used."""
        while self._lowest < MAX_COUNT and not self._orders[self._lowest]:
            self._lowest += 1
        for order in self._orders[self._lowest :]:
            yield from order

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._counts

    def check(self) -> None:
        """Assert that every key is in the order of its count."""
        assert sum(map(len, self._orders)) == len(self._counts)
        assert all(key in self._orders[count] for key, count in self._counts.items())
        assert not any(self._orders[: self._lowest])


class Sieve(Policy):
    """SIEVE (Zhang et al., NSDI'24, https://www.usenix.org/conference/nsdi24/presentation/zhang-yazhuo).

    One queue from old to new, a mark on every key that was read, and a hand. The hand walks from the oldest to the
    newest: a marked key loses its mark and stays in place, an unmarked one is evicted. Surviving keys keep their place,
    so new ones are tested early and hot keys gather behind the hand.

    Example: a, b, c were added in this order, a was read. The hand passes a (mark off) and evicts b; the next victim is
    c, the newest, so that the hand then wraps to the oldest: a is evicted next, even if d has been added by then.

    The order is kept as two dictionaries, each from old to new: ``_behind`` holds the keys passed by the hand in this
    round, ``_ahead`` those still in front of it. A new key joins ``_ahead``. When ``_ahead`` becomes empty the hand
    wraps.
    """

    name = "sieve"

    def __init__(self) -> None:
        self._marked: dict[ChunkKey, bool] = {}
        self._behind: OrderedDict[ChunkKey, None] = OrderedDict()
        self._ahead: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key`` as the newest, unmarked."""
        assert key not in self._marked, f"{key!r} was added before"
        self._marked[key] = False
        self._ahead[key] = None

    def touch(self, key: ChunkKey) -> bool:
        """Mark ``key``."""
        if key not in self._marked:
            return False
        self._marked[key] = True
        return True

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key``; if it is evicted, move the hand first."""
        if evicted:
            self._walk_to(key)
        del self._marked[key]
        (self._ahead if key in self._ahead else self._behind).pop(key)
        self._wrap()

    def _wrap(self) -> None:
        """Reset the hand to the oldest key once it has passed the newest, before another key is added."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def _walk_to(self, key: ChunkKey) -> None:
        """Move the hand to the first unmarked key, which may differ from ``key`` if leases protect it."""
        if self._marked[key]:  # every evictable key is marked: the hand went all the way round
            self._marked = dict.fromkeys(self._marked, False)
        while self._marked[first := next(iter(self._ahead))]:
            self._marked[first] = False
            del self._ahead[first]
            self._behind[first] = None
            self._wrap()

    def victims(self) -> Iterator[ChunkKey]:
        """Yield unmarked keys in the order of the hand, then the marked ones, which lose their marks as it passes."""
        for wanted in (False, True):
            for part in (self._ahead, self._behind):
                yield from (key for key in part if self._marked[key] is wanted)

    def __len__(self) -> int:
        return len(self._marked)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._marked

    def check(self) -> None:
        """Assert that each key is either ahead of the hand or behind it, and that the hand points at a key."""
        assert self._ahead or not self._behind
        assert self._marked.keys() == self._ahead.keys() | self._behind.keys()
        assert not self._ahead.keys() & self._behind.keys()

    def __repr__(self) -> str:
        return f"Sieve({len(self._ahead)} keys ahead of the hand, {len(self._behind)} behind)"
