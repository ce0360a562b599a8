"""What clients have proclaimed and their nodes have yet to confirm: chunks in desks, and values on their way. Pure.

A client that writes a value into its desk or a range tells the master by itself, and the node tells it again, a little
later and with others. Until the node has done so the entry in the directory is a promise: the client may have died
before it told the node, and then no node will ever say anything of that chunk. So a promise that nobody has confirmed
for ``PROMISE_S`` is taken back. A node that knows of the put, because it had reserved a range for it, withdraws the
promise as soon as that has come to nothing.

Example: at 10.0 s k is proclaimed for node A; at 10.05 A announces k: the promise is kept, and forgotten here. At 11.0
m is proclaimed for A and its client is killed: at 14.0 ``broken`` names (m, A), and the directory takes it out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

#: A node that lives confirms within some ticks; one that does not is given up after about as long.
PROMISE_S = 3.0
#: Promises at once; beyond it clients ask their node, as without a desk.
MAX_PROMISES = 1 << 16


class Promise(NamedTuple):
    """``node_id`` will announce the key at ``version`` before ``until_s``."""

    node_id: str
    version: int
    size_bytes: int
    until_s: float


class Promises:
    """At most one for a key, in the order in which they were made."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, Promise] = OrderedDict()
        self.num_withdrawn = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def full(self) -> bool:
        """Whether no more are taken."""
        return len(self._by_key) >= MAX_PROMISES

    def make(self, key: str, node_id: str, version: int, size_bytes: int, now_s: float) -> None:
        """A client has proclaimed ``key``; nobody holds it, so what was promised of it before is void."""
        self._by_key.pop(key, None)
        self._by_key[key] = Promise(node_id, version, size_bytes, now_s + PROMISE_S)

    def settle(self, key: str, node_id: str) -> None:
        """The node itself has spoken of ``key``: what it says counts."""
        promise = self._by_key.get(key)
        if promise is not None and promise.node_id == node_id:
            del self._by_key[key]

    def withdraw(self, key: str, node_id: str, version: int) -> bool:
        """The node will not hold this put; returns whether that was promised."""
        promise = self._by_key.get(key)
        if promise is None or (promise.node_id, promise.version) != (node_id, version):
            return False
        del self._by_key[key]
        self.num_withdrawn += 1
        return True

    def of(self, node_id: str) -> list[tuple[str, Promise]]:
        """All promises about ``node_id``."""
        return [(key, promise) for key, promise in self._by_key.items() if promise.node_id == node_id]

    def forget_node(self, node_id: str) -> None:
        """The node is gone, and what it promised with it."""
        for key, _ in self.of(node_id):
            del self._by_key[key]

    def broken(self, now_s: float) -> list[tuple[str, Promise]]:
        """Promises whose time is over, each once."""
        broken: list[tuple[str, Promise]] = []
        while self._by_key:
            key, promise = next(iter(self._by_key.items()))
            if promise.until_s > now_s:
                break
            del self._by_key[key]
            broken.append((key, promise))
        return broken

    def check(self) -> None:
        """Assert the bound and the order."""
        assert len(self._by_key) <= MAX_PROMISES
        times = [promise.until_s for promise in self._by_key.values()]
        assert times == sorted(times)

    def __repr__(self) -> str:
        return f"Promises({len(self._by_key)})"
