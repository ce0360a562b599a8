"""Selection of the worker's blocks to keep in the store, and the time to write them. Pure.

* *all*: every new full block, at once.
* *second-use*: a block when a second request uses it: one-time prompts leave nothing behind.
* *defer*: a block on its second use at once, as above; others while the engine is idle, the oldest dropped beyond a
  bound. Blocks evicted from the cache meanwhile are not written.
* *none*: nothing; prefixes are still loaded.

A use is a commit (the block was computed here, perhaps for the second time after an eviction) or a hit in the
worker's own cache. Worked example, *defer* with room for 2 blocks: A, B and C are computed, so A, the oldest, is
dropped. A prompt hits B: it is written. The engine falls idle: C is written. A is computed again: that is its second
use, it is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from tanghulu.types import BlockHash
from tanghulu.workers.engine.step import CommittedBlock

#: Hashes whose first use is remembered: 64 tokens each, so 4 million tokens; about 10 MB.
MAX_REMEMBERED = 65_536


class StorePolicy:
    """Selects blocks to write: every use of a block is reported, and answered with the blocks to write now.

    The cache may have evicted a deferred block: its hash shows whether it is still that block. This one is *none*.
    """

    num_dropped = 0

    @property
    def num_deferred(self) -> int:
        """Blocks waiting for `idle`."""
        return 0

    def committed(self, blocks: Iterable[CommittedBlock]) -> list[CommittedBlock]:
        """Note blocks just computed, which can be matched from now on."""
        return []

    def reused(self, blocks: Iterable[CommittedBlock]) -> list[CommittedBlock]:
        """Note blocks that a request found in the worker's cache."""
        return []

    def idle(self, max_blocks: int) -> list[CommittedBlock]:
        """Return up to ``max_blocks`` deferred blocks, because the engine has nothing to do."""
        return []

    def lost(self, hashes: Iterable[BlockHash]) -> None:
        """Note blocks returned for writing that are not in the store."""


class WriteAll(StorePolicy):
    """The policy *all*: reused blocks were written when they were computed, or loaded from the store."""

    def committed(self, blocks: Iterable[CommittedBlock]) -> list[CommittedBlock]:
        return list(blocks)


class WriteAgain(StorePolicy):
    """The policies *second-use* (``max_deferred`` 0) and *defer*."""

    def __init__(self, max_deferred: int, max_remembered: int = MAX_REMEMBERED) -> None:
        self.num_dropped = 0
        self._max_deferred = max_deferred
        self._max_remembered = max_remembered
        self._seen: OrderedDict[BlockHash, bool] = OrderedDict()  # whether it was returned for writing
        self._deferred: OrderedDict[BlockHash, CommittedBlock] = OrderedDict()  # oldest first

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def committed(self, blocks: Iterable[CommittedBlock]) -> list[CommittedBlock]:
        found = []
        for block in blocks:
            if self._is_second(block.block_hash, again=True):
                found.append(self._give(block))
            else:
                self._defer(block)
        return found

    def reused(self, blocks: Iterable[CommittedBlock]) -> list[CommittedBlock]:
        """Write blocks not written yet."""
        return [self._give(block) for block in blocks if self._is_second(block.block_hash, again=False)]

    def idle(self, max_blocks: int) -> list[CommittedBlock]:
        """Write deferred blocks, the latest first: they are the likeliest to be in the cache still."""
        found: list[CommittedBlock] = []
        while self._deferred and len(found) < max_blocks:
            block_hash, block = self._deferred.popitem()
            self._remember(block_hash, given=True)
            found.append(block)
        return found

    def lost(self, hashes: Iterable[BlockHash]) -> None:
        """Write them on their next use."""
        self._seen.update(dict.fromkeys(self._seen.keys() & set(hashes), False))

    def _is_second(self, block_hash: BlockHash, *, again: bool) -> bool:
        """Return whether this use makes the block worth writing; ``again``: computed again, so the store lost it."""
        given = self._seen.get(block_hash)
        if given is None:
            self._remember(block_hash, given=False)
            return False
        return again or not given

    def _give(self, block: CommittedBlock) -> CommittedBlock:
        self._deferred.pop(block.block_hash, None)
        self._remember(block.block_hash, given=True)
        return block

    def _remember(self, block_hash: BlockHash, *, given: bool) -> None:
        self._seen[block_hash] = given
        self._seen.move_to_end(block_hash)
        if len(self._seen) > self._max_remembered:
            self._seen.popitem(last=False)

    def _defer(self, block: CommittedBlock) -> None:
        if self._max_deferred == 0:
            return
        self._deferred[block.block_hash] = block
        if len(self._deferred) > self._max_deferred:
            self._deferred.popitem(last=False)
            self.num_dropped += 1

    def check(self) -> None:
        assert len(self._seen) <= self._max_remembered
        assert len(self._deferred) <= self._max_deferred
        assert not any(self._seen.get(block_hash, False) for block_hash in self._deferred)


POLICIES: dict[str, Callable[[int], StorePolicy]] = {
    "all": lambda _: WriteAll(),
    "second-use": lambda _: WriteAgain(0),
    "defer": WriteAgain,
    "none": lambda _: StorePolicy(),
}


def make_store_policy(name: str, max_deferred: int) -> StorePolicy:
    """Return the policy ``name``, a key of `POLICIES`; at most ``max_deferred`` blocks wait."""
    return POLICIES[name](max_deferred)
