"""Least recently used. With a request's blocks touched tail first it evicts leaves before the prefix they stand on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.types import ChunkKey


class Lru:
    """Evicts what was added or touched longest ago."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Enter ``key`` as the most recently used."""
        assert key not in self._order, f"{key!r} was added before"
        self._order[key] = None

    def touch(self, key: ChunkKey) -> None:
        """Make ``key`` the most recently used."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Forget ``key``."""
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        """Keys from the least to the most recently used."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._order

    def check(self) -> None:
        """Nothing beyond what the dictionary keeps by itself."""

    def __repr__(self) -> str:
        return f"Lru({len(self._order)} keys)"
