"""What the node's decisions come to: values that its shells act on, and what has been counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.waiters import Waiter
from tanghulu.types import LeaseId


class EvictionReason(Enum):
    """Why a chunk had to leave memory; the value is its name in the metrics."""

    ROOM = "room"  # a put needed its place
    DESK = "desk"  # a desk did
    WATERMARK = "watermark"  # evicted ahead of need
    QUOTA = "quota"  # its tenant holds too much
    OPERATOR = "operator"  # somebody said so
    STOPPING = "stopping"  # sent down to the SSD, for the node's next start

    __hash__ = object.__hash__  # see Pin


@dataclass(slots=True)
class NodeCounters:
    """What has happened since the start; ``metrics`` publishes it."""

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
    evictions_by: dict[EvictionReason, int] = field(default_factory=lambda: dict.fromkeys(EvictionReason, 0))

    def hit(self, num_bytes: int) -> None:
        """A get found a chunk of so many bytes."""
        self.hits += 1
        self.hit_bytes += num_bytes

    @property
    def evictions(self) -> int:
        """For whatever reason."""
        return sum(self.evictions_by.values())


@dataclass(frozen=True, slots=True)
class Reserved:
    """A range for the writer. ``lease_id`` 0: the node writes. ``copies_only``: the holder must not use its mapping."""

    chunk: Chunk
    lease_id: LeaseId
    copies_only: bool = False


@dataclass(frozen=True, slots=True)
class Existed:
    """The key is there already: nothing to write."""

    chunk: Holding


Outcome: TypeAlias = Reserved | Existed | Waiter


@dataclass(frozen=True, slots=True)
class Pinned:
    """A chunk that stays where it is until the lease ends."""

    chunk: Chunk
    lease_id: LeaseId
    copies_only: bool
