"""Clients' commits not yet confirmed by their nodes: chunks in write buffers, and values in transit. Pure.

A client that writes a value into its write buffer or a reserved range commits it at the master by itself, and the node
announces it again, a little later and with others. Until then the commit is pending: the client may have died before it
notified the node, and then no node will ever announce that chunk. So a commit that no node has confirmed for
``PENDING_S`` is overdue, and undone once its node has named all its chunks, twice: one message may have been in flight,
the other left later. Time alone undoes nothing: the client has reported to its user that the chunk exists, and a master
or a node that stalls for some seconds has only not got around to it. A lost node takes its commits along. A node that
knows of the put, because it had reserved a range for it, retracts the commit as soon as the put has failed.

Example: at 10.0 s k is committed for node A; at 10.05 A announces k: the commit is confirmed, and forgotten here. At
11.0 m is committed for A and its client is killed: from 14.0 on m is overdue. A's messages of 14.2 and 15.2 do not name
it: with the second, ``take_overdue`` returns (m, A), and the directory removes it.
"""

from __future__ import annotations

from typing import NamedTuple

#: A live node confirms within some ticks; a chunk not named within this time may never be.
PENDING_S = 3.0
#: Pending commits of a range at once; beyond it clients ask their node, as without a write buffer.
MAX_PENDING = 1 << 10


class PendingCommit(NamedTuple):
    """A chunk to be announced by ``node_id`` at ``version`` before ``until_s``."""

    node_id: str
    version: int
    size_bytes: int
    until_s: float


class PendingCommits:
    """The pending commits of a range, at most one per key."""

    __slots__ = ("_by_key", "_due", "_overdue")

    def __init__(self) -> None:
        self._by_key: dict[str, PendingCommit] = {}
        self._due: dict[str, None] = {}  # the keys of those not overdue, in the order of their commits
        #: By node: keys of overdue ones, first those already overdue when the node last named its chunks.
        self._overdue: dict[str, tuple[dict[str, None], dict[str, None]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def full(self) -> bool:
        """Whether no more commits are accepted."""
        return len(self._by_key) >= MAX_PENDING

    def make(self, key: str, node_id: str, version: int, size_bytes: int, now_s: float) -> None:
        """Enter a client's commit of ``key``; nobody holds the key, so an earlier commit of it is void."""
        self._forget(key)
        self._by_key[key] = PendingCommit(node_id, version, size_bytes, now_s + PENDING_S)
        self._due[key] = None

    def announced(self, key: str, node_id: str, version: int) -> bool:
        """``settle`` the chunk announced by its node; return whether the node should announce another of the key."""
        pending = self._by_key.get(key)
        if pending is None or pending.node_id != node_id:
            return False
        if pending.version != version:
            return True
        self._forget(key)
        return False

    def settle(self, key: str, node_id: str, version: int) -> bool:
        """Forget the commit: its node has announced the chunk or its removal, or the put failed there.

        Returns whether it was pending.
        """
        pending = self._by_key.get(key)
        if pending is None or (pending.node_id, pending.version) != (node_id, version):
            return False
        self._forget(key)
        return True

    def of(self, node_id: str) -> list[tuple[str, PendingCommit]]:
        """Return all pending commits of chunks at ``node_id``."""
        return [(key, pending) for key, pending in self._by_key.items() if pending.node_id == node_id]

    def forget_node(self, node_id: str) -> None:
        """Forget the commits of a departed node."""
        for key, _ in self.of(node_id):
            self._forget(key)

    def tick(self, now_s: float) -> bool:
        """Advance the time; return whether a commit is overdue."""
        while self._due:
            key = next(iter(self._due))
            pending = self._by_key[key]
            if pending.until_s > now_s:
                break
            del self._due[key]
            self._overdue.setdefault(pending.node_id, ({}, {}))[1][key] = None
        return bool(self._overdue)

    def take_overdue(self, node_id: str) -> list[tuple[str, PendingCommit]]:
        """Return each commit, once, that the node will not confirm any more, as it has named all its chunks."""
        earlier, later = self._overdue.pop(node_id, ({}, {}))
        if later:
            self._overdue[node_id] = (later, {})
        return [(key, self._by_key.pop(key)) for key in earlier]

    def _forget(self, key: str) -> None:
        pending = self._by_key.pop(key, None)
        if pending is None:
            return
        self._due.pop(key, None)
        earlier, later = self._overdue.get(pending.node_id, ({}, {}))
        earlier.pop(key, None)
        later.pop(key, None)
        if not earlier and not later:
            self._overdue.pop(pending.node_id, None)

    def check(self) -> None:
        """Assert the bound, the order, and that each commit is due or overdue."""
        assert len(self._by_key) <= MAX_PENDING
        times = [self._by_key[key].until_s for key in self._due]
        assert times == sorted(times)
        overdue = [key for earlier, later in self._overdue.values() for key in (*earlier, *later)]
        assert sorted([*self._due, *overdue]) == sorted(self._by_key)
        for node_id, (earlier, later) in self._overdue.items():
            assert earlier or later
            assert all(self._by_key[key].node_id == node_id for key in (*earlier, *later))

    def __repr__(self) -> str:
        return f"PendingCommits({len(self._by_key)})"
