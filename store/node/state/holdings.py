"""A chunk of a node, in memory or in the tier below, and that tier as the decisions see it."""

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
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that it holds."""
        ...

    @property
    def free_queue_bytes(self) -> int:
        """Bytes that may be demoted at once without being dropped for want of time."""
        ...

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """The entry of ``key``."""
        ...

    def entries(self) -> list[SsdChunk]:
        """All entries."""
        ...

    def demote(self, chunk: Chunk, left_s: float | None) -> SsdChunk | None:
        """Keep ``chunk``, which leaves memory in this step; None if it is dropped instead. ``left_s`` None: no end."""
        ...

    def touch(self, entry: SsdChunk) -> None:
        """Somebody put the key again."""
        ...

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Let another policy order the tier's own evictions."""
        ...

    def drop(self, entry: SsdChunk) -> None:
        """Let ``entry`` go."""
        ...

    def expire(self, now_s: float) -> None:
        """Let go what has come to its end."""
        ...


class NoTier:
    """A node without one."""

    capacity_bytes = 0
    used_bytes = 0
    free_queue_bytes = 1 << 62  # nothing goes down, so nothing is dropped for want of time

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """Nothing is here."""
        return None

    def entries(self) -> list[SsdChunk]:
        """Nothing."""
        return []

    def demote(self, chunk: Chunk, left_s: float | None) -> SsdChunk | None:
        """Everything is dropped."""
        return None

    def touch(self, entry: SsdChunk) -> None:
        """There is none."""
        raise AssertionError("no entry without a tier")

    def drop(self, entry: SsdChunk) -> None:
        """There is none."""
        raise AssertionError("no entry without a tier")

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Nothing is ordered."""

    def expire(self, now_s: float) -> None:
        """Nothing ends."""
