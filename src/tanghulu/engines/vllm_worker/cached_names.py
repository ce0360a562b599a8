"""What vLLM's prefix cache holds, as its KV events tell: sessions begin with it, and hear what changes. Pure.

vLLM may keep two blocks of one name, when two requests compute the same prompt at once, and tells each of them: a name
is gone when its last block is. Example: stored a, stored a, removed a: the conductor hears "stored a" alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind


class CachedNames:
    """The names of the cached blocks, with how many blocks each has."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> list[BlockHash]:
        """The names of all cached blocks."""
        return list(self._blocks)

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        """How many of the leading ``names`` are cached."""
        return next((i for i, name in enumerate(names) if name not in self._blocks), len(names))

    def apply(self, change: KvChange) -> list[KvEvent]:
        """Take one of vLLM's events; returns what changed in the set of names."""
        events = []
        if change.cleared:
            events += [KvEvent(KvEventKind.REMOVED, name) for name in self._blocks]
            self._blocks.clear()
        for name in change.stored:
            count = self._blocks.get(name, 0)
            self._blocks[name] = count + 1
            if not count:
                events.append(KvEvent(KvEventKind.STORED, name))
        for name in change.removed:
            count = self._blocks.get(name, 0)
            if count > 1:
                self._blocks[name] = count - 1
            elif count:
                del self._blocks[name]
                events.append(KvEvent(KvEventKind.REMOVED, name))
        return events

    def check(self) -> None:
        assert all(count > 0 for count in self._blocks.values())
