"""The two simple policies, FIFO and LRU: an ordered dictionary whose order is the order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.types import ChunkKey


class Ordered:
    """Keys in the order of their eviction. Subclasses say what ``add`` and ``touch`` do to the order."""

    name = ""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    @property
    def num_ghosts(self) -> int:
        """No evicted key is remembered: 0."""
        return 0

    def begin_batch(self) -> None:
        """Ignore the hint: only the order of keys matters here."""

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Enter ``key`` as the last to go."""
        assert key not in self._order, f"{key!r} was added before"
        self._order[key] = None

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Forget ``key``."""
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        """Keys from the first to the last to go."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._order

    def check(self) -> None:
        """Nothing to assert beyond what the dictionary keeps by itself."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._order)} keys)"


class Fifo(Ordered):
    """First in, first out: evicts what was added longest ago.

    The cheapest order, blind to reads. Useful where every chunk is read about once.
    """

    name = "fifo"

    def touch(self, key: ChunkKey) -> None:
        """Ignore the read."""


class Lru(Ordered):
    """Least recently used: evicts what was added or touched longest ago.

    With a request's blocks touched tail first it evicts leaves before the prefix they stand on.
    """

    name = "lru"

    def touch(self, key: ChunkKey) -> None:
        """Make ``key`` the most recently used."""
        if key in self._order:
            self._order.move_to_end(key)
