"""First in, first out: the cheapest order, blind to reads. Useful where every chunk is read about once."""

from __future__ import annotations

from tanghulu.eviction.ordered import Ordered
from tanghulu.types import ChunkKey


class Fifo(Ordered):
    """Evicts what was added longest ago."""

    name = "fifo"

    def touch(self, key: ChunkKey) -> None:
        """Reads change nothing."""
