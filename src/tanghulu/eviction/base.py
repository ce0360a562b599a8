"""The interface of an eviction policy: it receives adds, touches and removes, and yields victims.

A policy only orders keys. Leases, pins, sizes and the moment of eviction are the node's responsibility. One contract
suite (tests/contracts/eviction.py) runs against every implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from tanghulu.types import ChunkKey


class Policy(ABC):
    """The order in which keys would be evicted. Calls but ``victims`` and ``check`` are O(1) or O(log n), amortised."""

    name: str

    @property
    def num_ghosts(self) -> int:
        """Number of evicted keys still remembered; a policy that remembers keys bounds it."""
        return 0

    def sampled(self, rate: float) -> None:  # noqa: B027 - most policies have no constants that depend on it
        """Hint, before any other call, that the policy gets only a share of all keys (0 < ``rate`` <= 1)."""

    def begin_batch(self) -> None:  # noqa: B027 - most policies ignore the hint
        """Hint that the adds and touches from here to the next call came in one request, its last key first.

        The keys of a request are a chain: each key's prefix follows it. Without the hint nothing breaks, but a policy
        that learns from chains learns less.
        """

    @abstractmethod
    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add a chunk that can be evicted in principle; asserts that the key is new."""

    @abstractmethod
    def touch(self, key: ChunkKey) -> bool:
        """Note that the chunk was read. Returns False, without effect, if the key is unknown."""

    @abstractmethod
    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop a chunk: ``evicted`` by this policy's choice, or removed otherwise. Raises KeyError if it is unknown."""

    @abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Yield all keys in eviction order. Calling it has no effect; the policy must not be changed meanwhile."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: ChunkKey) -> bool: ...

    @abstractmethod
    def check(self) -> None:
        """Assert the policy's invariants."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} keys)"
