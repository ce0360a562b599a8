"""What the simple policies share: an ordered dictionary whose order is the order of eviction, or part of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.types import ChunkKey


class Ordered:
    """Keys in the order of their eviction. Subclasses say what ``add`` and ``touch`` do to the order."""

    name = ""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    @property
    def num_ghosts(self) -> int:
        """None is remembered."""
        return 0

    def begin_batch(self) -> None:
        """Requests mean nothing here beyond the order of their keys."""

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Enter ``key`` as the last to go."""
        assert key not in self._order, f"{key!r} was added before"
        self._order[key] = None

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Forget ``key``."""
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        """Keys from the first to the last to go."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._order

    def check(self) -> None:
        """Nothing beyond what the dictionary keeps by itself."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._order)} keys)"
