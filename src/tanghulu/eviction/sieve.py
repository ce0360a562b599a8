"""SIEVE (Zhang et al., NSDI'24, https://www.usenix.org/conference/nsdi24/presentation/zhang-yazhuo).

One queue from old to new, a mark on every key that was read, and a hand. The hand walks from the oldest to the newest:
a marked key loses its mark and stays in place, an unmarked one is evicted. Surviving keys keep their place, so new ones
are tested early and hot keys gather behind the hand.

Example: a, b, c were added in this order, a was read. The hand passes a (mark off) and evicts b; the next victim is c,
the newest, so that the hand then wraps to the oldest: a is evicted next, even if d has been added by then.

The order is kept as two dictionaries, each from old to new: ``_behind`` holds the keys passed by the hand in this
round, ``_ahead`` those still in front of it. A new key joins ``_ahead``. When ``_ahead`` becomes empty the hand wraps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.types import ChunkKey


class Sieve:
    """Evicts the first unmarked key that the hand meets."""

    name = "sieve"

    def __init__(self) -> None:
        self._marked: dict[ChunkKey, bool] = {}
        self._behind: OrderedDict[ChunkKey, None] = OrderedDict()
        self._ahead: OrderedDict[ChunkKey, None] = OrderedDict()

    @property
    def num_ghosts(self) -> int:
        """Number of remembered evicted keys: always 0."""
        return 0

    def begin_batch(self) -> None:
        """Ignore the hint: only the order of keys matters here."""

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key`` as the newest, unmarked."""
        assert key not in self._marked, f"{key!r} was added before"
        self._marked[key] = False
        self._ahead[key] = None

    def touch(self, key: ChunkKey) -> bool:
        """Mark ``key``."""
        if key not in self._marked:
            return False
        self._marked[key] = True
        return True

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key``; if it is evicted, move the hand first."""
        if evicted:
            self._walk_to(key)
        del self._marked[key]
        (self._ahead if key in self._ahead else self._behind).pop(key)
        self._wrap()

    def _wrap(self) -> None:
        """Reset the hand to the oldest key once it has passed the newest, before another key is added."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def _walk_to(self, key: ChunkKey) -> None:
        """Move the hand to the first unmarked key, which may differ from ``key`` if leases protect it."""
        if self._marked[key]:  # every evictable key is marked: the hand went all the way round
            self._marked = dict.fromkeys(self._marked, False)
        while self._marked[first := next(iter(self._ahead))]:
            self._marked[first] = False
            del self._ahead[first]
            self._behind[first] = None
            self._wrap()

    def victims(self) -> Iterator[ChunkKey]:
        """Yield unmarked keys in the order of the hand, then the marked ones, which lose their marks as it passes."""
        for wanted in (False, True):
            for part in (self._ahead, self._behind):
                yield from (key for key in part if self._marked[key] is wanted)

    def __len__(self) -> int:
        return len(self._marked)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._marked

    def check(self) -> None:
        """Assert that each key is either ahead of the hand or behind it, and that the hand points at a key."""
        assert self._ahead or not self._behind
        assert self._marked.keys() == self._ahead.keys() | self._behind.keys()
        assert not self._ahead.keys() & self._behind.keys()

    def __repr__(self) -> str:
        return f"Sieve({len(self._ahead)} keys ahead of the hand, {len(self._behind)} behind)"
