"""Prefixes fetched more often than their holders should serve, to be copied in advance. Pure.

A request sent to a worker without its prefix fetches that prefix. The index counts prefixes of certain lengths (4, 6,
8, 12, 16, 24 … blocks, each identified by its last hash) that end within the fetched blocks; counts halve every
HALF_LIFE_S. A prefix fetched at least ``rate_per_holder`` times a second should have enough holders that each serves no
more than that rate, MAX_HOLDERS at most. Of the hot prefixes of one chain, copies are requested of the longest, and of
a shorter one only if it needs more holders.

Example with a rate of 10: an agent's prompt of 100 blocks is fetched 25 times a second, by requests with different
tails. Its first 4, 6, … 96 blocks are hot; three holders are requested for the 96. Requests that hit their worker's own
cache fetch nothing, so they do not count.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

H = TypeVar("H", bound=Hashable)

HALF_LIFE_S = 5.0
#: A steady rate r gives a count of r times this.
_COUNT_S = HALF_LIFE_S / math.log(2)
#: Prefixes counted; the one not fetched for longest is dropped first.
MAX_PREFIXES = 4096
MAX_HOLDERS = 4
FIRST_BLOCKS, MAX_BLOCKS = 4, 4096
#: Seconds for which copies are requested, and after which they are requested again while needed.
ASK_S, AGAIN_S = 30.0, 10.0
#: Upper limit of blocks requested in one round.
MAX_ASKED_BLOCKS = 8192
#: Lowest fetches per second of a prefix shown to people.
MIN_SHOWN_RATE = 0.01

_LENGTHS = sorted({n for k in range(2, 12) for n in (1 << k, 3 << k - 1) if FIRST_BLOCKS <= n <= MAX_BLOCKS})


@dataclass(frozen=True, slots=True)
class WantedCopies(Generic[H]):
    """A request for copies: ``num_holders`` nodes should hold ``blocks``, of the model with this fingerprint."""

    fingerprint: bytes
    blocks: tuple[H, ...]
    num_holders: int


@dataclass(slots=True)
class _Prefix(Generic[H]):
    fingerprint: bytes
    num_blocks: int
    count: float = 0.0
    counted_s: float = 0.0
    blocks: tuple[H, ...] = ()  # set once it is hot
    requested_s: float = -math.inf


class HotPrefixes(Generic[H]):
    """Counts fetches of prefixes and finds the hot ones. A ``rate_per_holder`` of 0 disables counting."""

    def __init__(self, rate_per_holder: float) -> None:
        assert rate_per_holder >= 0
        self._rate = rate_per_holder
        self._prefixes: OrderedDict[H, _Prefix[H]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def fetched(self, fingerprint: bytes, hashes: Sequence[H], first: int, stop: int, now_s: float) -> None:
        """Count a request that is about to fetch ``hashes[first:stop]`` of its prompt."""
        if not self._rate:
            return
        for length in _LENGTHS:
            if length > stop:
                break
            if length > first:
                self._count(fingerprint, hashes, length, now_s)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def wanted(self, now_s: float, num_holders: Callable[[Sequence[H]], int]) -> list[WantedCopies[H]]:
        """Return the copies to request now; ``num_holders`` returns how many nodes hold all of the given blocks.

        A prefix is requested again after AGAIN_S while it is hot, whichever nodes hold it by then.
        """
        copies: list[WantedCopies[H]] = []
        covered: dict[H, int] = {}
        left = MAX_ASKED_BLOCKS
        for prefix in sorted(self._hot(now_s), key=lambda each: -each.num_blocks):
            wanted = min(MAX_HOLDERS, math.ceil(self._rate_of(prefix, now_s) / self._rate))
            if covered.get(prefix.blocks[-1], 0) >= wanted:
                continue
            covered.update((prefix.blocks[n - 1], wanted) for n in _LENGTHS if n <= prefix.num_blocks)
            if now_s < prefix.requested_s + AGAIN_S or prefix.num_blocks > left:
                continue
            if prefix.requested_s > -math.inf or num_holders(prefix.blocks) < wanted:
                prefix.requested_s = now_s
                left -= prefix.num_blocks
                copies.append(WantedCopies(prefix.fingerprint, prefix.blocks, wanted))
        return copies

    def hottest(self, num_prefixes: int, now_s: float) -> list[dict[str, Any]]:
        """Return the most often fetched prefixes, for people; of equally hot ones of one chain, the longest."""
        rated = [(self._rate_of(prefix, now_s), prefix.num_blocks, last) for last, prefix in self._prefixes.items()]
        rated.sort(key=lambda each: (-round(each[0], 2), -each[1]))
        return [
            {"fetches_per_s": rate, "num_blocks": num_blocks, "last_block": str(last)}
            for rate, num_blocks, last in rated[:num_prefixes]
            if rate > MIN_SHOWN_RATE
        ]

    def check(self) -> None:
        assert len(self._prefixes) <= MAX_PREFIXES
        for last, prefix in self._prefixes.items():
            assert not prefix.blocks or (len(prefix.blocks) == prefix.num_blocks and prefix.blocks[-1] == last)

    def _count(self, fingerprint: bytes, hashes: Sequence[H], length: int, now_s: float) -> None:
        last = hashes[length - 1]
        prefix = self._prefixes.get(last)
        if prefix is None:
            prefix = self._prefixes[last] = _Prefix(fingerprint, length)
        self._prefixes.move_to_end(last)
        prefix.count, prefix.counted_s = self._count_of(prefix, now_s) + 1, now_s
        if not prefix.blocks and self._rate_of(prefix, now_s) > self._rate:
            prefix.blocks = tuple(hashes[:length])

    def _hot(self, now_s: float) -> list[_Prefix[H]]:
        hot = []
        for prefix in self._prefixes.values():
            if prefix.blocks and self._rate_of(prefix, now_s) <= self._rate:
                prefix.blocks, prefix.requested_s = (), -math.inf
            elif prefix.blocks:
                hot.append(prefix)
        return hot

    def _rate_of(self, prefix: _Prefix[H], now_s: float) -> float:
        """Return the fetches per second of a prefix."""
        return self._count_of(prefix, now_s) / _COUNT_S

    def _count_of(self, prefix: _Prefix[H], now_s: float) -> float:
        return prefix.count * math.exp2((prefix.counted_s - now_s) / HALF_LIFE_S)
