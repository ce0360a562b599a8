"""The two simple policies, FIFO and LRU: keys in a list, which is the order of eviction.

Each key stores its neighbours' names. An OrderedDict does the same in C, but pauses for 0.1 s whenever it grows at half
a million keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tanghulu.parted_dict import PartedDict
from tanghulu.types import ChunkKey


class _Place(msgspec.Struct, eq=False, gc=False):
    """The neighbours of a key; None at either end."""

    before: ChunkKey | None
    after: ChunkKey | None


class Ordered:
    """Keys in eviction order. Subclasses define the effect of ``touch`` on the order."""

    name = ""

    def __init__(self) -> None:
        self._places = PartedDict[ChunkKey, _Place]()
        self._first: ChunkKey | None = None
        self._last: ChunkKey | None = None

    @property
    def num_ghosts(self) -> int:
        """Number of remembered evicted keys: always 0."""
        return 0

    def begin_batch(self) -> None:
        """Ignore the hint: only the order of keys matters here."""

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
        for key in self.victims():
            assert self._places[key].before == before
            num_keys, before = num_keys + 1, key
        assert num_keys == len(self._places)
        assert self._last == before

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._places)} keys)"


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
