"""A chunk of a node, in memory or in the tier below, and that tier as used by the decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from tanghulu.eviction.base import Policy
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.types import ChunkKey

#: A chunk to be reported: key, version, size, tier, and whether it is still held.
Holding: TypeAlias = Chunk | SsdChunk


class LowerTier(Protocol):
    """A place for evicted chunks; ``tier.SsdTier`` is one. Every call takes effect at once."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it can hold."""

    @property
    def used_bytes(self) -> int:
        """Bytes that it holds."""

    @property
    def free_queue_bytes(self) -> int:
        """Bytes that may be demoted at once without being dropped for lack of time."""

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """Return the entry of ``key``."""

    def entries(self) -> list[SsdChunk]:
        """Return all entries."""

    def demote(self, chunk: Chunk, left_s: float | None) -> SsdChunk | None:
        """Keep ``chunk``, which leaves memory in this step; None if it is dropped instead. ``left_s`` None: no end."""

    def touch(self, entry: SsdChunk) -> None:
        """Record another put of the key."""

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Let another policy order the tier's own evictions."""

    def drop(self, entry: SsdChunk) -> None:
        """Drop ``entry``."""

    def expire(self, now_s: float) -> None:
        """Drop expired entries."""


class NoTier:
    """A node without one."""

    capacity_bytes = 0
    used_bytes = 0
    free_queue_bytes = 1 << 62  # nothing is demoted, so nothing is dropped for lack of time

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """Return None, as there are no entries."""
        return None

    def entries(self) -> list[SsdChunk]:
        """Return no entries."""
        return []

    def demote(self, chunk: Chunk, left_s: float | None) -> SsdChunk | None:
        """Drop everything."""
        return None

    def touch(self, entry: SsdChunk) -> None:
        """Do nothing, as there are no entries."""
        raise AssertionError("no entry without a tier")

    def drop(self, entry: SsdChunk) -> None:
        """Do nothing, as there are no entries."""
        raise AssertionError("no entry without a tier")

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Do nothing, as nothing is evicted."""

    def expire(self, now_s: float) -> None:
        """Do nothing, as there are no entries."""
