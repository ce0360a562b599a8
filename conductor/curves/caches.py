"""Simulated caches of blocks: in front of one of the product's eviction policies, and one that knows the future."""

from __future__ import annotations

import heapq
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


def optimal_hits(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return the number of leading blocks that each of ``requests`` (the chains of their blocks) finds.

    Belady's rule with bypass: of all blocks those are kept whose next use is nearest, the head of a chain before its
    tail. A prefix is used whenever its continuation is, so what is kept is always closed under prefixes, and the rule
    is optimal for prefix hits, too.
    """
    next_uses, seen = [], dict[int, int]()
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number]
        next_uses.append([seen.get(block) for block in blocks])
        seen.update(dict.fromkeys(blocks, number))
    kept: dict[int, int] = {}  # block -> its next use
    furthest: list[tuple[int, int, int]] = []
    hits = []
    for blocks, uses in zip(requests, reversed(next_uses), strict=True):
        hits.append(next((i for i, block in enumerate(blocks) if block not in kept), len(blocks)))
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            if use is None:
                kept.pop(block, None)
                continue
            kept[block] = use
            heapq.heappush(furthest, (-use, -depth, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(furthest)
            if kept.get(block) == -use:
                del kept[block]
        if len(furthest) > 2 * len(kept) + 65536:
            furthest = [entry for entry in furthest if kept.get(entry[2]) == -entry[0]]
            heapq.heapify(furthest)
    return hits
