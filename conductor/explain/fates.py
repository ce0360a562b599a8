"""The fates of blocks: the latest removal of each from a cache or a store node, and the workers that went away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tanghulu.types import BlockHash, InstanceId

#: Removed blocks remembered, some 100 bytes each: between half of them and all.
MAX_REMOVED: Final = 1 << 18
#: Holders remembered as gone.
MAX_GONE: Final = 1024


class Fate(NamedTuple):
    """A removal of blocks from ``holder``. ``request`` is the last one that had been sent there, which needed room."""

    at_s: float
    holder: InstanceId
    is_store: bool
    request: str = ""


class Fates:
    """The removed blocks, in two generations: when the younger is full, it replaces the older one. Pure."""

    def __init__(self) -> None:
        self._half = MAX_REMOVED // 2
        self._young: dict[BlockHash, Fate] = {}
        self._old: dict[BlockHash, Fate] = {}
        self._gone: dict[InstanceId, float] = {}

    def removed(self, blocks: Iterable[BlockHash], fate: Fate) -> None:
        self._young.update(dict.fromkeys(blocks, fate))
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def gone(self, holder: InstanceId, now_s: float) -> None:
        """Record that ``holder`` went away with all its blocks."""
        self._gone.pop(holder, None)
        self._gone[holder] = now_s
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def of(self, block: BlockHash) -> Fate | None:
        return self._young.get(block) or self._old.get(block)

    def gone_s(self, holder: InstanceId) -> float | None:
        """Return when ``holder`` last went away; None if it did not."""
        return self._gone.get(holder)
