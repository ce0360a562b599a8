"""A cache of blocks in front of one of the product's eviction policies, for whole streams and for samples of them."""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.eviction import Policy
from tanghulu.types import ChunkKey


class Miniature:
    """A cache of ``capacity`` blocks of one size. A request hits by prefix; then all its blocks are used, tail first.

    With a sample of the blocks and as small a share of the capacity it behaves like the whole cache (Waldspurger et
    al., ATC'17).
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        assert capacity > 0
        self.policy, self.capacity = policy, capacity

    def request(self, blocks: Sequence[ChunkKey]) -> int:
        """Serve one chain of blocks; return how many of the first ones were there."""
        policy = self.policy
        hits = next((i for i, block in enumerate(blocks) if block not in policy), len(blocks))
        policy.begin_batch()
        for block in reversed(blocks):
            if not policy.touch(block):
                self._make_room(1)
                policy.add(block, 1)
        return hits

    def resize(self, capacity: int) -> None:
        """Change the capacity; the policy chooses what goes if that is less."""
        assert capacity > 0
        self.capacity = capacity
        self._make_room(0)

    def _make_room(self, num_blocks: int) -> None:
        while len(self.policy) + num_blocks > self.capacity:
            self.policy.remove(next(self.policy.victims()), evicted=True)
