"""Orders to nodes to copy and to drop chunks: the open ones, and their limits. Pure; independent of the reasons.

Two bounds for every node, counted as source and as target alike: ``MAX_OPEN`` orders, and a rate in bytes a second (a
token bucket that may go below zero by one order, so that a chunk larger than a second's worth moves too). Targets pull:
an order waits here until its target announces, and ends when the target announces the chunk, reports a failure, or
``ORDER_S`` have passed. The end of a drop is invisible if the node no longer holds the chunk, so sent drops are
remembered for the same time: a node whose connection broke may never have received them, and gets them again over the
next one.

Example at 100 MB/s: an order of 80 MB leaves 20 MB, another of 80 MB leaves -60 MB; 0.6 s later there is room again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from tanghulu.store.protocol.announcements import DropOrder

MAX_OPEN = 64
#: Orders in one answer to a node.
MAX_TAKEN = 64
#: Drops waiting for one node; more are forgotten, and found again by the next walk.
MAX_DROPS = 4096
ORDER_S = 30.0


class Reason(Enum):
    """The reason for which a chunk is copied."""

    RESTORE = "fewer nodes hold it than shall"
    DRAIN = "its node is going to be stopped"
    FILL = "a node is much emptier than the others; the source drops it afterwards"
    HOT = "it is read more often than its holders should answer, or somebody says that it will be"

    __hash__ = object.__hash__  # see Pin


class Copy(NamedTuple):
    """``target`` pulls the chunk from ``source``."""

    key: str
    version: int
    size_bytes: int
    source: str
    target: str
    reason: Reason


class _Budget:
    """A token bucket of one second's worth."""

    def __init__(self, rate: float, now_s: float) -> None:
        self._tokens = rate
        self._at_s = now_s

    def has_some(self, rate: float, now_s: float) -> bool:
        self._tokens = min(rate, self._tokens + (now_s - self._at_s) * rate)
        self._at_s = now_s
        return self._tokens > 0

    def spend(self, num_bytes: int) -> None:
        self._tokens -= num_bytes


class CopyOrders:
    """The open orders of all nodes. ``num_done`` counts by reason and outcome (done, failed, expired)."""

    def __init__(self, rate_bytes_s: float) -> None:
        self._whole_rate = rate_bytes_s
        self.share = 1.0  # of the rate; the rest belongs to other masters, which order copies of other keys
        self._open: dict[tuple[str, str], tuple[Copy, float]] = {}  # (key, target) -> (order, end)
        self._targets: dict[str, set[str]] = {}  # key -> targets of its open orders
        self._load: Counter[str] = Counter()  # open orders by node, as source and as target
        self._incoming_bytes: Counter[str] = Counter()
        self._waiting: dict[str, deque[Copy]] = {}
        self._drops: dict[str, dict[DropOrder, None]] = {}
        self._sent_drops: dict[tuple[str, DropOrder], float] = {}  # (node, drop) -> end
        self._budgets: dict[str, _Budget] = {}
        self.num_done: Counter[tuple[Reason, str]] = Counter()
        self.bytes_done: Counter[Reason] = Counter()

    @property
    def _rate(self) -> float:
        return self._whole_rate * self.share

    @property
    def active(self) -> bool:
        """Whether anything is open."""
        return bool(self._open or self._drops or self._sent_drops)

    def has_room(self, node_id: str, now_s: float) -> bool:
        """Return whether ``node_id`` may take part in one more copy."""
        budget = self._budgets.get(node_id)
        return self._load[node_id] < MAX_OPEN and (budget is None or budget.has_some(self._rate, now_s))

    def load(self, node_id: str) -> int:
        """Return the number of open orders of ``node_id``."""
        return self._load[node_id]

    def incoming_bytes(self, node_id: str) -> int:
        """Return the bytes of the copies on their way to ``node_id``."""
        return self._incoming_bytes[node_id]

    def targets_of(self, key: str) -> frozenset[str]:
        """Return the nodes that ``key`` is being copied to."""
        return frozenset(self._targets.get(key, ()))

    def order(self, copy: Copy, now_s: float) -> None:
        """Open an order; the caller has checked that both nodes have room (``has_room``)."""
        assert copy.target != copy.source
        assert (copy.key, copy.target) not in self._open, f"{copy.key!r} is on its way to {copy.target}"
        self._open[copy.key, copy.target] = (copy, now_s + ORDER_S)
        self._targets.setdefault(copy.key, set()).add(copy.target)
        self._waiting.setdefault(copy.target, deque()).append(copy)
        self._incoming_bytes[copy.target] += copy.size_bytes
        for node_id in (copy.source, copy.target):
            self._load[node_id] += 1
            self._budgets.setdefault(node_id, _Budget(self._rate, now_s)).spend(copy.size_bytes)

    def drop(self, node_id: str, drop: DropOrder) -> None:
        """Have ``node_id`` drop a copy."""
        waiting = self._drops.setdefault(node_id, {})
        if len(waiting) < MAX_DROPS:
            waiting[drop] = None

    def take(self, node_id: str, now_s: float) -> tuple[list[Copy], list[DropOrder]]:
        """Return the orders to send ``node_id`` now, each once."""
        waiting = self._waiting.get(node_id)
        copies = [waiting.popleft() for _ in range(min(len(waiting), MAX_TAKEN))] if waiting else []
        copies = [copy for copy in copies if (copy.key, node_id) in self._open]
        if not waiting:
            self._waiting.pop(node_id, None)
        drops = list(self._drops.pop(node_id, ()))
        self._sent_drops.update(((node_id, drop), now_s + ORDER_S) for drop in drops)
        return copies, drops

    def repeat_drops(self, node_id: str) -> None:
        """Repeat the drops to ``node_id``, which has a new connection: the last answer over the old one may be lost."""
        for each, drop in self._sent_drops:
            if each == node_id:
                self.drop(node_id, drop)

    def was_ordered_to_drop(self, node_id: str, key: str, version: int) -> bool:
        """Return whether the removal announced by ``node_id`` was ordered; True once per order."""
        orders = [(node_id, DropOrder(key, version, removed)) for removed in (False, True)]
        ordered = [order for order in orders if order in self._sent_drops]
        for order in ordered:
            del self._sent_drops[order]
        return bool(ordered)

    def done(self, key: str, target: str) -> Copy:
        """Close and return the order, one of ``targets_of``, that ``target`` fulfilled by announcing ``key``."""
        copy = self._close(key, target, "done")
        assert copy is not None, f"{key!r} was not on its way to {target}"
        return copy

    def failed(self, key: str, target: str) -> None:
        """Close the order of ``target``, which could not get ``key``."""
        self._close(key, target, "failed")

    def expire(self, now_s: float) -> None:
        """Close orders that were open too long, and forget drops that were sent long ago."""
        for key, target in [where for where, (_, until_s) in self._open.items() if until_s <= now_s]:
            self._close(key, target, "expired")
        for where in [where for where, until_s in self._sent_drops.items() if until_s <= now_s]:
            del self._sent_drops[where]
        if not self._open:
            self._load.clear()

    def forget_nodes(self, alive: Iterable[str]) -> None:
        """Close the orders of departed nodes."""
        known = set(alive)
        for (key, target), (copy, _) in list(self._open.items()):
            if target not in known or copy.source not in known:
                self._close(key, target, "failed")
        for gone in (self._drops.keys() | self._budgets.keys() | self._waiting.keys()) - known:
            self._drops.pop(gone, None)
            self._budgets.pop(gone, None)
            self._waiting.pop(gone, None)
        self._sent_drops = {where: until_s for where, until_s in self._sent_drops.items() if where[0] in known}

    def _close(self, key: str, target: str, outcome: str) -> Copy | None:
        entry = self._open.pop((key, target), None)
        if entry is None:
            return None
        copy = entry[0]
        targets = self._targets[key]
        targets.discard(target)
        if not targets:
            del self._targets[key]
        self._incoming_bytes[target] -= copy.size_bytes
        for node_id in (copy.source, target):
            self._load[node_id] -= 1
        self.num_done[copy.reason, outcome] += 1
        if outcome == "done":
            self.bytes_done[copy.reason] += copy.size_bytes
        return copy

    def check(self) -> None:
        """Assert that the counts match the open orders, and the bounds."""
        load: Counter[str] = Counter()
        incoming: Counter[str] = Counter()
        for (key, target), (copy, _) in self._open.items():
            assert (copy.key, copy.target) == (key, target)
            assert target in self._targets[key]
            load.update((copy.source, target))
            incoming[target] += copy.size_bytes
        assert +load == +self._load
        assert +incoming == +self._incoming_bytes
        assert sum(map(len, self._targets.values())) == len(self._open)
        assert all(count <= MAX_OPEN for count in load.values())
        assert all(len(drops) <= MAX_DROPS for drops in self._drops.values())

    def __repr__(self) -> str:
        return f"CopyOrders({len(self._open)} open, {sum(map(len, self._drops.values()))} drops)"
