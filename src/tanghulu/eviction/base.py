"""The interface of an eviction policy: it receives adds, touches and removes, and yields victims.

A policy only orders keys. Leases, pins, sizes and the moment of eviction are the node's responsibility. One contract
suite (tests/contracts/eviction.py) runs against every implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tanghulu.types import ChunkKey


class Policy(Protocol):
    """The order in which keys would be evicted. Calls but ``victims`` and ``check`` are O(1) or O(log n), amortised."""

    name: str

    @property
    def num_ghosts(self) -> int:
        """Number of evicted keys still remembered; a policy that remembers keys bounds it."""
        ...

    def begin_batch(self) -> None:
        """Hint that the adds and touches from here to the next call came in one request, its last key first.

        The keys of a request are a chain: each key's prefix follows it. Without the hint nothing breaks, but a policy
        that learns from chains learns less.
        """
        ...

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add a chunk that can be evicted in principle; asserts that the key is new."""
        ...

    def touch(self, key: ChunkKey) -> bool:
        """Note that the chunk was read. Returns False, without effect, if the key is unknown."""
        ...

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop a chunk: ``evicted`` by this policy's choice, or removed otherwise. Raises KeyError if it is unknown."""
        ...

    def victims(self) -> Iterator[ChunkKey]:
        """Yield all keys in eviction order. Calling it has no effect; the policy must not be changed meanwhile."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: ChunkKey) -> bool: ...

    def check(self) -> None:
        """Assert the policy's invariants."""
        ...
