"""A dict of millions of keys without long pauses: many small dicts, each for the keys of some hashes.

A full dict is copied into a larger one in one step: 0.1 s at a million keys, while an event loop waits. Here no part
grows large, and they do not all grow at once, as no two have the same number of keys.

Example: a million keys make some 980 in each part; the 1,366th key of a part triggers its copy, in 20 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

V = TypeVar("V")
K = TypeVar("K", bound=str)

#: Ten million keys make 10,000 in each part, which is copied within 1 ms.
NUM_PARTS = 1024
#: ``hash(key) >> PART_SHIFT`` is a key's part, negative numbers from the end: the high bits of 64. Dicts use the low.
PART_SHIFT = 54


class PartedDict(Generic[K, V]):
    """A mapping from strings; see the module. Iteration order is undefined."""

    def __init__(self) -> None:
        self._parts: list[dict[K, V]] = [{} for _ in range(NUM_PARTS)]
        self._num_keys = 0

    def get(self, key: K) -> V | None:
        """Return the value of ``key``; None if absent."""
        return self._parts[hash(key) >> PART_SHIFT].get(key)

    def __getitem__(self, key: K) -> V:
        return self._parts[hash(key) >> PART_SHIFT][key]

    def __setitem__(self, key: K, value: V) -> None:
        part = self._parts[hash(key) >> PART_SHIFT]
        self._num_keys -= len(part)
        part[key] = value
        self._num_keys += len(part)

    def __delitem__(self, key: K) -> None:
        part = self._parts[hash(key) >> PART_SHIFT]
        del part[key]
        self._num_keys -= 1
        if not part:
            part.clear()  # an emptied dict keeps its table, a cleared one does not

    def __contains__(self, key: K) -> bool:
        return key in self._parts[hash(key) >> PART_SHIFT]

    def __len__(self) -> int:
        return self._num_keys

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._parts)

    def values(self) -> Iterator[V]:
        """Iterate over all values; the dict must not change meanwhile."""
        return chain.from_iterable(map(dict.values, self._parts))

    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over all keys with their values; the dict must not change meanwhile."""
        return chain.from_iterable(map(dict.items, self._parts))

    def check(self) -> None:
        """Assert that each key is in its part, and that all are counted."""
        for part in filter(None, self._parts):
            assert all(self._parts[hash(key) >> PART_SHIFT] is part for key in part)
        assert self._num_keys == sum(map(len, self._parts))

    def __repr__(self) -> str:
        return f"PartedDict({self._num_keys} keys)"
