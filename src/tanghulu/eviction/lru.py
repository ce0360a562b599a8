"""Least recently used. With a request's blocks touched tail first it evicts leaves before the prefix they stand on."""

from __future__ import annotations

from tanghulu.eviction.ordered import Ordered
from tanghulu.types import ChunkKey


class Lru(Ordered):
    """Evicts what was added or touched longest ago."""

    name = "lru"

    def touch(self, key: ChunkKey) -> None:
        """Make ``key`` the most recently used."""
        if key in self._order:
            self._order.move_to_end(key)
