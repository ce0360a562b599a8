"""What a node's decisions hold and ask: a key's chunk in either tier, the tier below, and the write buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from tanghulu.eviction.base import Policy
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.protocol.write_buffer import DeskPlace
from tanghulu.types import ChunkKey

#: A chunk to be reported: key, version, size, tier, and whether it is still held.
Holding: TypeAlias = Chunk | SsdChunk


class LowerTier(Protocol):
    """Where evicted chunks may go; ``tier.SsdTier`` is one. Every call takes effect at once."""

    @property
    def capacity_bytes(self) -> int:
        """What it can hold."""
        ...

    @property
    def used_bytes(self) -> int:
        """What it holds."""
        ...

    @property
    def free_queue_bytes(self) -> int:
        """What may be demoted at once without being dropped for want of time."""
        ...

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """The entry of ``key``."""
        ...

    def entries(self) -> list[SsdChunk]:
        """All of them."""
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


class WriteBufferHoldings(Protocol):
    """Ranges that clients write chunks into by themselves; ``writes.write_buffers.WriteBuffers`` has them.

    Chunks that are returned were committed by their clients at the master, and are not in the node's table yet.
    """

    @property
    def num_open(self) -> int:
        """Write buffers that may bring chunks yet."""
        ...

    @property
    def num_heads(self) -> int:
        """Write buffers that clients may still look at."""
        ...

    @property
    def num_taken(self) -> int:
        """Chunks so far."""
        ...

    def drain(self) -> Sequence[Chunk]:
        """What was committed since the last call."""
        ...

    def tick(self, now_s: float, *, unwanted: bool) -> Sequence[Chunk]:
        """The same; close what is idle or left, all if ``unwanted``, and free what is quiet."""
        ...

    def wanted(self, session_id: int, value_bytes: int) -> tuple[int, int] | None:
        """(bytes, bytes at least) of a write buffer for values of about that size; None: the session gets none."""
        ...

    def open(self, session_id: int, offset: int, length: int, key_scope: str) -> DeskPlace:
        """Lend a range that is taken from the allocator."""
        ...

    def knows(self, session_id: int) -> bool:
        """Whether something still depends on the end of the session's process."""
        ...

    def session_closed(self, session_id: int) -> Sequence[Chunk]:
        """The session's connections are gone."""
        ...

    def session_exited(self, session_id: int) -> Sequence[Chunk]:
        """The session's process has ended."""
        ...

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what is neither free nor a chunk's."""
        ...


class NoWriteBuffers:
    """A node whose memory nobody maps."""

    num_open = num_heads = num_taken = 0

    def drain(self) -> Sequence[Chunk]:
        """Nothing."""
        return ()

    def tick(self, now_s: float, *, unwanted: bool) -> Sequence[Chunk]:
        """Nothing."""
        return ()

    def wanted(self, session_id: int, value_bytes: int) -> tuple[int, int] | None:
        """None is given."""
        return None

    def open(self, session_id: int, offset: int, length: int, key_scope: str) -> DeskPlace:
        """None is wanted."""
        raise AssertionError("a node without write buffers lends no range")

    def knows(self, session_id: int) -> bool:
        """No session has one."""
        return False

    def session_closed(self, session_id: int) -> Sequence[Chunk]:
        """Nothing."""
        return ()

    def session_exited(self, session_id: int) -> Sequence[Chunk]:
        """Nothing."""
        return ()

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Nothing."""
        return iter(())
