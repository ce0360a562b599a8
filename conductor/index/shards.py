"""KV events on their way into the prefix index: large ones in slices, so that no decision waits for a snapshot.

Pure. A connecting worker reports its whole cache, hundreds of thousands of blocks, which the index processes at a few
million a second: every request arriving meanwhile would wait for all of it. So an event of more than ``SLICE_BLOCKS``
is cut and queued, and a task of the event loop applies a slice at a time (``apply_some``). Holders are distributed over
``num_shards`` queues that are served in turn: one holder's snapshot delays only the holders of its own shard. A small
event with an empty queue is applied at once, as nearly all are.

Example: 2 shards, a in the first and b in the second. a reports 5,000 blocks: 2,048 + 2,048 + 904. Then b reports 64:
applied at once, as its queue is empty. a removes 32: after its three slices, since events of one holder stay in order.

Bound: beyond ``MAX_WAITING_BLOCKS``, events are applied at once, after those already queued; the index lags no further.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from zlib import crc32

from tanghulu.conductor.index.prefix_index import Cleared, PrefixEvent, Stored
from tanghulu.types import InstanceId

#: Blocks applied between two checks for other work: about a millisecond.
SLICE_BLOCKS = 2048
MAX_WAITING_BLOCKS = 4_000_000
DEFAULT_SHARDS = 4


class EventShards:
    """The queues: ``put`` events, ``apply_some`` while there are any. ``apply`` gets those of one holder in order."""

    def __init__(
        self,
        apply: Callable[[PrefixEvent], None],
        num_shards: int = DEFAULT_SHARDS,
        max_waiting_blocks: int = MAX_WAITING_BLOCKS,
    ) -> None:
        assert num_shards > 0
        self._apply = apply
        self._shards: list[deque[PrefixEvent]] = [deque() for _ in range(num_shards)]
        self._turn = 0
        self._max_waiting_blocks = max_waiting_blocks
        self.waiting_blocks = 0

    def put(self, event: PrefixEvent) -> bool:
        """Apply or queue ``event``; return whether events are waiting for ``apply_some``."""
        shard = self._shards[crc32(event.holder.encode()) % len(self._shards)]
        size = _size(event)
        if not shard and size <= SLICE_BLOCKS:
            self._apply(event)
        elif self.waiting_blocks + size > self._max_waiting_blocks:
            while shard:
                self._apply_first(shard)
            self._apply(event)
        else:
            self.waiting_blocks += size
            shard.extend(_slices(event))
        return self.waits

    @property
    def waits(self) -> bool:
        return any(self._shards)

    def waiting_holders(self) -> set[InstanceId]:
        return {event.holder for shard in self._shards for event in shard}

    def apply_some(self) -> bool:
        """Apply events of the next shard, up to a slice's blocks; return whether there are more."""
        for _ in self._shards:
            self._turn = (self._turn + 1) % len(self._shards)
            shard, left = self._shards[self._turn], SLICE_BLOCKS
            if shard:
                while shard and left > 0:
                    left -= max(1, self._apply_first(shard))
                break
        return self.waits

    def check(self) -> None:
        assert self.waiting_blocks == sum(_size(event) for shard in self._shards for event in shard)
        assert self.waiting_blocks <= self._max_waiting_blocks

    def _apply_first(self, shard: deque[PrefixEvent]) -> int:
        event = shard.popleft()
        size = _size(event)
        self.waiting_blocks -= size
        self._apply(event)
        return size


def _size(event: PrefixEvent) -> int:
    return 0 if isinstance(event, Cleared) else len(event.blocks)


def _slices(event: PrefixEvent) -> list[PrefixEvent]:
    """Split ``event`` into parts of at most SLICE_BLOCKS."""
    if isinstance(event, Cleared) or len(event.blocks) <= SLICE_BLOCKS:
        return [event]
    parts = [event.blocks[at : at + SLICE_BLOCKS] for at in range(0, len(event.blocks), SLICE_BLOCKS)]
    if isinstance(event, Stored):
        return [Stored(event.holder, part, event.consecutive) for part in parts]
    return [type(event)(event.holder, part) for part in parts]
