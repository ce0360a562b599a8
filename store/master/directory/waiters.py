"""The calls that wait for keys to be stored: a bounded board. Pure.

A waiting call names its keys and ends when each of them has been seen stored, when its time is up, or when its owner
leaves. Example: w1 waits for a, b; w2 for b. b is stored: w2 ends. a is stored: w1 ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable

from tanghulu.auth.tenants import tenant_of
from tanghulu.errors import Overloaded

MAX_WAITERS = 1 << 15
#: Waiting calls of one connection: far below its calls in flight, so that other calls get through.
MAX_WAITERS_PER_OWNER = 128
#: Keys of all waiting calls together.
MAX_KEYS = 1 << 20
#: A tenant has at most this fraction (1 / n) of the waiting calls, and of their keys.
_SHARES = 4
#: Ended calls that may still have an entry in ``_ends``, beyond one for each current call.
_MOST_ENDED = 64


class WaitingCall:
    """One waiting call; ``missing`` are its keys not seen yet, all of one tenant."""

    __slots__ = ("missing", "num_keys", "owner", "tenant", "until_s")

    def __init__(self, owner: object, missing: set[str], until_s: float) -> None:
        self.owner = owner
        self.missing = missing
        self.until_s = until_s
        self.num_keys = len(missing)
        self.tenant = tenant_of(next(iter(missing), ""))

    def __repr__(self) -> str:
        return f"WaitingCall({len(self.missing)} keys until {self.until_s:g})"


class WaitBoard:
    """All waiting calls. ``until_s`` and ``now_s`` are of one clock; owners are compared by identity."""

    def __init__(self) -> None:
        self._by_key: dict[str, dict[WaitingCall, None]] = {}
        self._by_owner: dict[object, dict[WaitingCall, None]] = {}
        self._ends: list[tuple[float, int, WaitingCall]] = []
        self._numbers = itertools.count()
        self._num_waiters = 0
        self._num_keys = 0
        self._calls_of: Counter[str] = Counter()
        self._keys_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_waiters

    def join(self, owner: object, missing: Iterable[str], until_s: float) -> WaitingCall:
        """Wait for ``missing``, at least one; raises Overloaded if too many wait already."""
        waiter = WaitingCall(owner, set(missing), until_s)
        assert waiter.missing, "there is something to wait for"
        own = self._by_owner.get(owner, {})
        if self._num_waiters >= MAX_WAITERS or self._num_keys + len(waiter.missing) > MAX_KEYS:
            raise Overloaded(f"{self._num_waiters} calls wait for {self._num_keys} keys already; try again")
        if len(own) >= MAX_WAITERS_PER_OWNER:
            raise Overloaded(f"{len(own)} calls of this connection wait already; ask for several keys in one call")
        calls, keys = self._calls_of[waiter.tenant], self._keys_of[waiter.tenant] + waiter.num_keys
        if waiter.tenant and (calls >= MAX_WAITERS // _SHARES or keys > MAX_KEYS // _SHARES):
            raise Overloaded(f"{calls} calls of tenant {waiter.tenant!r} wait already, which is its share; try again")
        self._calls_of[waiter.tenant] += 1
        self._keys_of[waiter.tenant] += waiter.num_keys
        self._by_owner.setdefault(owner, own)[waiter] = None
        for key in waiter.missing:
            self._by_key.setdefault(key, {})[waiter] = None
        self._num_waiters += 1
        self._num_keys += len(waiter.missing)
        heapq.heappush(self._ends, (until_s, next(self._numbers), waiter))
        return waiter

    def stored(self, keys: Iterable[str]) -> list[WaitingCall]:
        """Record that ``keys`` are stored; return the waiting calls that end by that."""
        over: list[WaitingCall] = []
        for key in keys:
            for waiter in self._by_key.pop(key, ()):
                waiter.missing.discard(key)
                self._num_keys -= 1
                if not waiter.missing:
                    over.append(waiter)
        for waiter in over:
            self._forget(waiter)
        return over

    def expire(self, now_s: float) -> list[WaitingCall]:
        """Remove and return the waiting calls whose time is up."""
        over: list[WaitingCall] = []
        while self._ends and self._ends[0][0] <= now_s:
            waiter = heapq.heappop(self._ends)[2]
            if waiter in self._by_owner.get(waiter.owner, ()):
                over.append(waiter)
                self._forget(waiter)
        return over

    def leave(self, owner: object) -> list[WaitingCall]:
        """Remove and return all waiting calls of ``owner``, which has left."""
        over = list(self._by_owner.get(owner, ()))
        for waiter in over:
            self._forget(waiter)
        return over

    def clear(self) -> list[WaitingCall]:
        """Remove and return all waiting calls: this master will not see their keys stored."""
        return [waiter for owner in list(self._by_owner) for waiter in self.leave(owner)]

    def _forget(self, waiter: WaitingCall) -> None:
        own = self._by_owner[waiter.owner]
        del own[waiter]
        if not own:
            del self._by_owner[waiter.owner]
        for key in waiter.missing:
            waiting = self._by_key[key]
            del waiting[waiter]
            if not waiting:
                del self._by_key[key]
        self._num_keys -= len(waiter.missing)
        self._num_waiters -= 1
        self._keys_of[waiter.tenant] -= waiter.num_keys
        self._calls_of[waiter.tenant] -= 1
        if not self._calls_of[waiter.tenant]:
            del self._calls_of[waiter.tenant], self._keys_of[waiter.tenant]
        waiter.missing = set()
        if len(self._ends) > 2 * self._num_waiters + _MOST_ENDED:
            self._ends = [entry for entry in self._ends if entry[2].missing]
            heapq.heapify(self._ends)

    def check(self) -> None:
        """Assert that the indexes agree and the bounds hold."""
        waiters = [waiter for own in self._by_owner.values() for waiter in own]
        assert len(waiters) == self._num_waiters <= MAX_WAITERS
        assert sum(len(waiter.missing) for waiter in waiters) == self._num_keys <= MAX_KEYS
        assert sum(map(len, self._by_key.values())) == self._num_keys
        assert self._calls_of == Counter(waiter.tenant for waiter in waiters)
        assert self._keys_of.total() == sum(waiter.num_keys for waiter in waiters)
        timed = {entry[2] for entry in self._ends}
        assert len(self._ends) <= 2 * len(waiters) + _MOST_ENDED
        assert sum(len(waiter.missing) for waiter in timed) == self._num_keys
        for waiter in waiters:
            assert waiter.missing, f"{waiter!r} is over"
            assert waiter in timed, f"{waiter!r} would never end"
            assert all(waiter in self._by_key[key] for key in waiter.missing)

    def __repr__(self) -> str:
        return f"WaitBoard({self._num_waiters} waiters, {self._num_keys} keys)"
