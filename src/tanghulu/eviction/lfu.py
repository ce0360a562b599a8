"""Least frequently used, the least recently used first among equals. Counts end with their chunk and stop at a limit.

Good for a fixed set of hot prefixes; bad if popularity changes, because once-hot keys stay for long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.types import ChunkKey

#: Chunks read more often count as equally hot.
MAX_COUNT = 255


class Lfu:
    """One LRU order for each count of reads; the lowest non-empty one gives the victim."""

    name = "lfu"

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, int] = {}
        self._orders: list[OrderedDict[ChunkKey, None]] = [OrderedDict() for _ in range(MAX_COUNT + 1)]
        self._lowest = 0  # all orders below it are empty

    @property
    def num_ghosts(self) -> int:
        """Number of remembered evicted keys: always 0."""
        return 0

    def begin_batch(self) -> None:
        """Ignore the hint: only the order of keys matters here."""

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

    def __repr__(self) -> str:
        return f"Lfu({len(self._counts)} keys)"
