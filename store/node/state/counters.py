"""Counts of a node since its start, and its most-read chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tanghulu.store.node.state.chunk import Chunk
from tanghulu.types import ChunkKey

#: Every 16th read of a chunk is counted by key.
SAMPLE = 16
MAX_KEYS = 64
#: Keys of one report, most-read first.
MAX_REPORTED = 16


class EvictionReason(Enum):
    """The reason for a chunk's eviction; the value is its name in the metrics."""

    ROOM = "room"  # a put needed its space
    WRITE_BUFFER = "write_buffer"  # a write buffer needed its space
    WATERMARK = "watermark"  # evicted ahead of demand
    QUOTA = "quota"  # its tenant holds too much
    OPERATOR = "operator"  # requested explicitly
    STOPPING = "stopping"  # demoted to the SSD, for the node's next start

    __hash__ = object.__hash__  # see Pin


@dataclass(slots=True)
class NodeCounters:
    """Counts since the start; ``metrics`` publishes them."""

    puts: int = 0
    puts_existed: int = 0
    hits: int = 0
    misses: int = 0
    evicted_bytes: int = 0
    expired: int = 0
    removed: int = 0
    refused: int = 0
    corrupt: int = 0
    lease_waits: int = 0
    store_full: int = 0
    hit_bytes: int = 0
    largest_free_bytes: int = 0  # at the last tick
    evictions_by: dict[EvictionReason, int] = field(default_factory=lambda: dict.fromkeys(EvictionReason, 0))

    def hit(self, num_bytes: int) -> None:
        """Count a get that found a chunk of ``num_bytes``."""
        self.hits += 1
        self.hit_bytes += num_bytes

    def evicted(self, num_bytes: int, reason: EvictionReason) -> None:
        """Count the eviction of a chunk of ``num_bytes``."""
        self.evictions_by[reason] += 1
        self.evicted_bytes += num_bytes

    @property
    def evictions(self) -> int:
        """Evictions for any reason."""
        return sum(self.evictions_by.values())


class HotKeys:
    """The most-read chunks since the last ``take``: bounded, and nearly free for the reads.

    Only every ``SAMPLE``-th read of a chunk is counted here (a chunk counts its own reads), so a chunk with fewer reads
    in its life costs nothing. Beyond ``MAX_KEYS`` the least counted key is replaced and the new one inherits its count
    (space-saving, Metwally et al. 2005).
    """

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, int] = {}

    def read(self, chunk: Chunk) -> None:
        """Count a read of ``chunk`` at the chunk."""
        chunk.num_hits += 1
        if not chunk.num_hits % SAMPLE:
            self.saw(chunk.key)

    def saw(self, key: ChunkKey) -> None:
        """Count ``SAMPLE`` more reads of ``key``."""
        counts = self._counts
        inherited = 0
        if key not in counts and len(counts) >= MAX_KEYS:
            inherited = counts.pop(min(counts, key=counts.__getitem__))
        counts[key] = counts.get(key, 0) + inherited + SAMPLE

    def take(self) -> list[tuple[ChunkKey, int]]:
        """Return (key, reads) of the most-read keys; counting restarts."""
        counts, self._counts = self._counts, {}
        return sorted(counts.items(), key=lambda entry: entry[1], reverse=True)[:MAX_REPORTED]

    def check(self) -> None:
        """Assert the bound on the number of keys."""
        assert len(self._counts) <= MAX_KEYS

    def __repr__(self) -> str:
        return f"HotKeys({len(self._counts)})"
