"""All keys of one moment in their order, for pages that are taken one after the other."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator

from tanghulu.types import ChunkKey

#: Keys that are sorted before other calls have their turn: about 5 ms.
_RUN_KEYS = 1 << 14


class SortedKeys:
    """The keys behind ``after``; each costs the same to take, wherever it stands. Equal ones come once."""

    def __init__(self, runs: list[list[ChunkKey]], after: str) -> None:
        self.after = after
        self._merged: Iterator[ChunkKey] = heapq.merge(*runs)
        self._next = next(self._merged, None)

    @classmethod
    async def of(cls, keys: list[ChunkKey], after: str) -> SortedKeys:
        """Sort ``keys`` in runs, with turns for others in between."""
        runs: list[list[ChunkKey]] = []
        for begin in range(0, len(keys), _RUN_KEYS):
            runs.append(sorted(key for key in keys[begin : begin + _RUN_KEYS] if key > after))
            await asyncio.sleep(0)
        return cls(runs, after)

    @property
    def more(self) -> bool:
        """Whether there are keys left."""
        return self._next is not None

    def take(self) -> ChunkKey:
        """The next key; asserts that there is one."""
        key = self._next
        assert key is not None, "there are more"
        while self._next == key:
            self._next = next(self._merged, None)
        return key
