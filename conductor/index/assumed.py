"""Blocks that a worker is assumed to have, because it recently computed them: the index without events.

Pure. An engine without KV events still keeps a prompt's blocks for a while. Prefilled blocks are assumed present for
``keep_s`` after their last use, and at most ``max_blocks`` per worker, the least recently used forgotten first. This is
not needed for an engine that publishes events; both may be mixed, by worker.

Example with 60 s: a prompt of blocks a b c was prefilled at 0, another of a b d at 50. At 70 c is forgotten, a b and d
are kept until 110.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId

DEFAULT_MAX_BLOCKS = 100_000


class AssumedBlocks:
    """The blocks that workers are assumed to hold, as changes of their caches."""

    def __init__(self, keep_s: float, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        assert keep_s > 0
        assert max_blocks > 0
        self._keep_s, self._max_blocks = keep_s, max_blocks
        self._until_s: dict[InstanceId, OrderedDict[BlockHash, float]] = {}

    def used(self, worker: InstanceId, blocks: Sequence[BlockHash], now_s: float) -> KvChange:
        """Record that ``worker`` has prefilled a prompt of ``blocks``. The tail is touched, and so forgotten, first."""
        until_s = self._until_s.setdefault(worker, OrderedDict())
        for block in reversed(blocks):
            until_s[block] = now_s + self._keep_s
            until_s.move_to_end(block)
        too_many = [until_s.popitem(last=False)[0] for _ in range(len(until_s) - self._max_blocks)]
        gone = set(too_many)
        return KvChange(tuple(block for block in blocks if block not in gone), tuple(too_many))

    def sweep(self, now_s: float) -> Iterator[tuple[InstanceId, KvChange]]:
        """Forget blocks that have not been used for too long; yield the changes by worker."""
        for worker, until_s in self._until_s.items():
            gone = []
            while until_s and next(iter(until_s.values())) <= now_s:
                gone.append(until_s.popitem(last=False)[0])
            if gone:
                yield worker, KvChange(removed=tuple(gone))

    def forget(self, worker: InstanceId) -> None:
        self._until_s.pop(worker, None)

    def check(self) -> None:
        for until_s in self._until_s.values():
            assert len(until_s) <= self._max_blocks
            assert list(until_s.values()) == sorted(until_s.values())
