"""The offline optimum of a cache of blocks: Belady's rule with bypass, for requests that hit by prefix.

Of all blocks those are kept whose next use is nearest, the head of a chain before its tail. A prefix is used whenever
its continuation is, so what is kept is always closed under prefixes, and the rule is optimal for prefix hits, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def optimal_hits(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return the number of leading blocks that each of ``requests`` (the chains of their blocks) finds."""
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
