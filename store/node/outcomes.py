"""What the node's decisions come to: values that its shells act on, and what has been counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tanghulu.store.node.chunk import Chunk
from tanghulu.store.node.holdings import Holding
from tanghulu.store.node.waiters import Waiter
from tanghulu.types import LeaseId


@dataclass(slots=True)
class NodeCounters:
    """What has happened since the start; ``metrics`` publishes it."""

    puts: int = 0
    puts_existed: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    expired: int = 0
    removed: int = 0
    refused: int = 0
    corrupt: int = 0
    lease_waits: int = 0
    store_full: int = 0
    watermark_evictions: int = 0


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
