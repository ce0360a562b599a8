"""Chunks that more nodes should hold: keys read very often, and keys requested explicitly. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from tanghulu.auth.tenants import tenant_of
from tanghulu.errors import InvalidRequest

#: Keys whose reads are counted.
MAX_HOT_KEYS = 1024
TAU_S = 5.0
#: Gets a second below which a key is forgotten.
MIN_RATE = 1.0
#: Keys with a request at one time.
MAX_REQUESTED_KEYS = 8192
#: A tenant has at most this fraction (1 / n) of them.
_SHARES = 4
#: Longest time that one call can request.
MAX_REQUEST_S = 3600.0


class HotKeyRates:
    """Decayed counts of reads, of a bounded number of keys.

    Nodes report the number of reads of their most-read chunks since the last announcement. A key's count decays with
    the time constant ``TAU_S``, so count / TAU_S is its rate in gets a second. Beyond ``MAX_HOT_KEYS`` the new key
    replaces the coolest one and inherits its count (space-saving, Metwally et al. 2005): a key that stays hot cannot be
    missed.

    Example: 500 gets are reported each second: the count settles at 500 * 5 = 2500 and the rate at 500 gets a second; 5
    s after the last of them it is 184.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # key -> (count, at)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, gets: Iterable[tuple[str, int]], now_s: float) -> None:
        """Count ``gets``: pairs of a key and its number of reads."""
        for key, num_gets in gets:
            inherited = 0.0
            if key not in self._counts and len(self._counts) >= MAX_HOT_KEYS:
                coolest = min(self._counts, key=lambda k: self._count(k, now_s))
                inherited = self._count(coolest, now_s)
                del self._counts[coolest]
            self._counts[key] = (self._count(key, now_s) + inherited + num_gets, now_s)

    def _count(self, key: str, now_s: float) -> float:
        count, at_s = self._counts.get(key, (0.0, now_s))
        return count * math.exp((at_s - now_s) / TAU_S)

    def rate(self, key: str, now_s: float) -> float:
        """Return the gets of ``key`` a second."""
        return self._count(key, now_s) / TAU_S

    def keys(self, now_s: float) -> list[str]:
        """Return the keys read at least ``MIN_RATE`` times a second, hottest first; forget the others."""
        rates = {key: self.rate(key, now_s) for key in self._counts}
        for key in [key for key, rate in rates.items() if rate < MIN_RATE]:
            del self._counts[key], rates[key]
        return sorted(rates, key=lambda k: rates[k], reverse=True)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._counts) <= MAX_HOT_KEYS

    def __repr__(self) -> str:
        return f"HotKeyRates({len(self._counts)} keys)"


class ReplicaRequests:
    """Requests for more holders of chunks, with their ends; CopyPlanner orders the copies.

    Example: a conductor sees that a document's prefix is about to be read from everywhere and requests two holders of
    its 100 chunks for 30 s. It repeats the request while that lasts; an expired request is forgotten here, and unread
    copies are dropped (CopyPlanner's cooling).
    """

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, float]] = {}  # key -> (wanted holders, end)
        self._num_of: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, keys: Iterable[str], holders: int, for_s: float, now_s: float) -> int:
        """Have ``holders`` nodes hold each of ``keys`` for ``for_s`` seconds; return how many keys were accepted.

        Beyond MAX_REQUESTED_KEYS, or its tenant's share, no new key is accepted. Raises InvalidRequest for less than
        one holder or a time outside of 0 to MAX_REQUEST_S.
        """
        if holders < 1:
            raise InvalidRequest(f"holders={holders} must be at least 1")
        if not (math.isfinite(for_s) and 0 < for_s <= MAX_REQUEST_S):
            raise InvalidRequest(f"for_s={for_s:g} must be above 0 and at most {MAX_REQUEST_S:g} s")
        num_taken = 0
        for key in keys:
            if key not in self._asked:
                tenant = tenant_of(key)
                most = MAX_REQUESTED_KEYS // _SHARES if tenant else MAX_REQUESTED_KEYS
                if len(self._asked) >= MAX_REQUESTED_KEYS or self._num_of[tenant] >= most:
                    continue
                self._num_of[tenant] += 1
            self._asked[key] = (holders, now_s + for_s)
            num_taken += 1
        return num_taken

    def wanted(self, key: str) -> int:
        """Return the number of nodes that should hold ``key``; 1 without a request."""
        return self._asked[key][0] if key in self._asked else 1

    def keys(self, now_s: float) -> list[str]:
        """Return the keys with a current request; forget the others."""
        over = [key for key, (_, until_s) in self._asked.items() if until_s <= now_s]
        for key in over:
            del self._asked[key]
        if over:
            self._num_of = Counter(map(tenant_of, self._asked))
        return list(self._asked)

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self._asked) <= MAX_REQUESTED_KEYS
        assert self._num_of == Counter(map(tenant_of, self._asked))
        assert all(holders >= 1 for holders, _ in self._asked.values())

    def __repr__(self) -> str:
        return f"ReplicaRequests({len(self._asked)} keys)"
