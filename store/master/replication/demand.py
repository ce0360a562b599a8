"""Which chunks are read so often that more nodes should hold them: decayed counts of a bounded number of keys. Pure.

Nodes tell how often their most-read chunks were read since they last announced. A key's count decays with the time
constant ``TAU_S``, so count / TAU_S is its rate in gets a second. Beyond ``MAX_KEYS`` the coolest key makes place and
the new one inherits its count (space-saving, Metwally et al. 2005): a key that stays hot cannot be missed.

Example: 500 gets are told each second: the count settles at 500 * 5 = 2500 and the rate at 500 gets a second; 5 s
after the last of them it is 184.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

MAX_KEYS = 1024
TAU_S = 5.0
#: Cooler than this a key is forgotten.
MIN_RATE = 1.0


class Heat:
    """See the module."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # key -> (count, at)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, gets: Iterable[tuple[str, int]], now_s: float) -> None:
        """``gets``: (key, how often it was read)."""
        for key, num_gets in gets:
            inherited = 0.0
            if key not in self._counts and len(self._counts) >= MAX_KEYS:
                coolest = min(self._counts, key=lambda k: self._count(k, now_s))
                inherited = self._count(coolest, now_s)
                del self._counts[coolest]
            self._counts[key] = (self._count(key, now_s) + inherited + num_gets, now_s)

    def _count(self, key: str, now_s: float) -> float:
        count, at_s = self._counts.get(key, (0.0, now_s))
        return count * exp((at_s - now_s) / TAU_S)

    def rate(self, key: str, now_s: float) -> float:
        """Gets a second."""
        return self._count(key, now_s) / TAU_S

    def keys(self, now_s: float) -> list[str]:
        """The keys that are warm, hottest first; cold ones are forgotten."""
        rates = {key: self.rate(key, now_s) for key in self._counts}
        for key in [key for key, rate in rates.items() if rate < MIN_RATE]:
            del self._counts[key], rates[key]
        return sorted(rates, key=lambda k: rates[k], reverse=True)

    def check(self) -> None:
        """It is bounded."""
        assert len(self._counts) <= MAX_KEYS

    def __repr__(self) -> str:
        return f"Heat({len(self._counts)} keys)"
