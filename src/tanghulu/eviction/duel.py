"""A duel of two eviction orders: the recently better one, judged by which victim is used again first (Belady's rule).

When both orders name a victim and they differ, the pair is remembered. If the key that A would have evicted is used
before the one that B would have evicted, A was wrong, whatever was actually evicted. A pair of which neither returns
has no result and is dropped. In the spirit of set duelling (Qureshi et al., ISCA'07), with pairs instead of sets.
"""

from __future__ import annotations

from collections import OrderedDict

from tanghulu.types import ChunkKey

MAX_PAIRS = 4096
#: Each decided pair moves the score by this fraction of the way to +1 or -1.
_STEP = 1 / 128
#: The challenger is dropped below the lower score and restored above the upper one.
_DROP_BELOW = -0.12
_TAKE_ABOVE = 0.0


class Duel:
    """The duel. ``challenger_leads`` names the order to follow: the challenger's until it has lost enough."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[int, tuple[ChunkKey, ChunkKey]] = OrderedDict()
        self._by_key: dict[ChunkKey, int] = {}
        self._next = 0
        self.score = 0.0
        self.challenger_leads = True

    def __len__(self) -> int:
        return len(self._pairs)

    def pose(self, champions: ChunkKey, challengers: ChunkKey) -> None:
        """Remember the two victims named at one moment; ignored if one is in another pair, or both are the same."""
        if champions == challengers or champions in self._by_key or challengers in self._by_key:
            return
        self._next += 1
        self._pairs[self._next] = (champions, challengers)
        self._by_key[champions] = self._by_key[challengers] = self._next
        if len(self._pairs) > MAX_PAIRS:
            _, pair = self._pairs.popitem(last=False)
            for key in pair:
                del self._by_key[key]

    def used(self, key: ChunkKey) -> None:
        """Note that ``key`` was used: if it is in a pair, the order that would have evicted it was wrong."""
        number = self._by_key.get(key)
        if number is None:
            return
        champions, challengers = self._pairs.pop(number)
        del self._by_key[champions], self._by_key[challengers]
        right = 1.0 if key == champions else -1.0
        self.score += (right - self.score) * _STEP
        if self.score < _DROP_BELOW:
            self.challenger_leads = False
        elif self.score > _TAKE_ABOVE:
            self.challenger_leads = True

    def check(self) -> None:
        """Assert that pairs and keys agree and are bounded."""
        assert len(self._pairs) <= MAX_PAIRS
        assert len(self._by_key) == 2 * len(self._pairs)
        assert -1 <= self.score <= 1
