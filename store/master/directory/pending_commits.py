"""Commits of clients that their nodes have yet to confirm: chunks in write buffers, and values on their way. Pure.

A client that writes a value into its write buffer or a reserved range commits it at the master by itself, and the node
announces it again, a little later and with others. Until then the commit is pending: the client may have died before it
told the node, and then no node will ever announce that chunk. So a commit that no node has confirmed for ``PENDING_S``
is taken back. A node that knows of the put, because it had reserved a range for it, retracts the commit as soon as the
put has failed.

Example: at 10.0 s k is committed for node A; at 10.05 A announces k: the commit is confirmed, and forgotten here. At
11.0 m is committed for A and its client is killed: at 14.0 ``expired`` names (m, A), and the directory takes it out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

#: A node that lives confirms within some ticks; one that does not is given up after about as long.
PENDING_S = 3.0
#: Pending commits of a range at once; beyond it clients ask their node, as without a write buffer.
MAX_PENDING = 1 << 10


class PendingCommit(NamedTuple):
    """A chunk that ``node_id`` should announce at ``version`` before ``until_s``."""

    node_id: str
    version: int
    size_bytes: int
    until_s: float


class PendingCommits:
    """The pending commits of a range, at most one for a key, in the order in which they were made."""

    __slots__ = ("_by_key",)

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, PendingCommit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def full(self) -> bool:
        """Whether no more commits are taken."""
        return len(self._by_key) >= MAX_PENDING

    def make(self, key: str, node_id: str, version: int, size_bytes: int, now_s: float) -> None:
        """Enter a client's commit of ``key``; nobody holds the key, so an earlier commit of it is void."""
        self._by_key.pop(key, None)
        self._by_key[key] = PendingCommit(node_id, version, size_bytes, now_s + PENDING_S)

    def is_for(self, key: str, node_id: str) -> bool:
        """Whether a commit of ``key`` is pending that ``node_id`` should announce."""
        pending = self._by_key.get(key)
        return pending is not None and pending.node_id == node_id

    def settle(self, key: str, node_id: str, version: int | None) -> None:
        """Forget the commit of ``key`` at ``version`` (None: at any): its node has announced it or its removal."""
        pending = self._by_key.get(key)
        if pending is not None and pending.node_id == node_id and version in (None, pending.version):
            del self._by_key[key]

    def retract(self, key: str, node_id: str, version: int) -> bool:
        """Forget the commit of a put that failed at its node; returns whether it was pending."""
        pending = self._by_key.get(key)
        if pending is None or (pending.node_id, pending.version) != (node_id, version):
            return False
        del self._by_key[key]
        return True

    def of(self, node_id: str) -> list[tuple[str, PendingCommit]]:
        """All pending commits of chunks at ``node_id``."""
        return [(key, pending) for key, pending in self._by_key.items() if pending.node_id == node_id]

    def forget_node(self, node_id: str) -> None:
        """Forget the commits of a node that is gone."""
        for key, _ in self.of(node_id):
            del self._by_key[key]

    def expired(self, now_s: float) -> list[tuple[str, PendingCommit]]:
        """The commits whose time is over, each once."""
        expired: list[tuple[str, PendingCommit]] = []
        while self._by_key:
            key, pending = next(iter(self._by_key.items()))
            if pending.until_s > now_s:
                break
            del self._by_key[key]
            expired.append((key, pending))
        return expired

    def check(self) -> None:
        """Assert the bound and the order."""
        assert len(self._by_key) <= MAX_PENDING
        times = [pending.until_s for pending in self._by_key.values()]
        assert times == sorted(times)

    def __repr__(self) -> str:
        return f"PendingCommits({len(self._by_key)})"
