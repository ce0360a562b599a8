"""The knowledge of a master that began empty: the nodes, and the slots of keys that they have reported. Pure.

The master keeps no log; all its knowledge comes from the nodes. So a new master must not mistake its ignorance for an
answer: a slot of keys is known when each node of the cluster has reported its chunks of that slot, or has left. Time
alone makes no slot known.

The first question is which nodes belong to the cluster. Each of several masters learns it from etcd (``NodesInEtcd``).
A single master (``ClusterNodes``) cannot know it: a first start and a restart look alike until an instance renews a
lease that this master did not grant. Then there was a predecessor, and more of its nodes may arrive at any moment, each
within a lease, since it notices when it renews. A node that has not come by then has no lease any more: it has left.
The first arrival may be a node as new as the master, with no chunks; so for ``ALONE_S`` no node is taken for the only
one.

    FRESH -- ALONE_S without a sign of a predecessor --> COUNTED
      |                                                    |
      +------ a lease of a predecessor is renewed ---------+--> REBUILDING -- the leases that it gave are over -+
      |                                                                                                         v
      +------------------ the leases that a predecessor gave are over -------------------------------------> ENTERED

In COUNTED and in ENTERED the known slots are those reported by all registered nodes.

The second question is answered by each range of keys for itself (``Rebuild``): how many of its slots are known. That
number falls again when a node arrives that may hold something: one that was expelled and is back, or that has restarted
with the contents of its disk. Its keys are not missing from its admission on, and it has to report them. A node that
states at its first registration that it is empty has thereby reported everything.

Example: 1,024 slots; nodes A and B have come back to a restarted master. After 3 s no other node can come. A has
reported the slots below 700, B those below 520: 520 slots are known. Ranges 0 to 31 are ready, range 32 knows 8 of its
16 slots, and a key of slot 600, in range 37, is neither here nor missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from enum import Enum

from tanghulu.store.protocol.key_slots import NUM_RANGES, RANGE_SLOTS, slot_of

#: A node's lease: a node that has not come to a new master within it has left the cluster.
REBUILD_S = 3.0
#: Longer than a node takes to renew its lease at a master that has come back: it tries again every 0.2 to 0.5 s.
ALONE_S = 1.0


class Membership(Enum):
    """The states of a master's knowledge of the cluster's nodes."""

    FRESH = "new; a predecessor's nodes may not have noticed it yet"
    COUNTED = "the nodes that registered are all there are"
    REBUILDING = "successor of another master; nodes that it has not heard of may hold chunks"
    ENTERED = "each node has registered, or its lease is over"


class MembershipEvent(Enum):
    """The events that change which nodes the master assumes to exist."""

    ALONE = "ALONE_S have passed"
    STRAY_LEASE = "an instance renewed a lease that this master never gave"
    LEASES_OVER = "each lease that a predecessor can have given is over"


TRANSITIONS: dict[tuple[Membership, MembershipEvent], Membership] = {
    (Membership.FRESH, MembershipEvent.ALONE): Membership.COUNTED,
    (Membership.FRESH, MembershipEvent.STRAY_LEASE): Membership.REBUILDING,
    (Membership.FRESH, MembershipEvent.LEASES_OVER): Membership.ENTERED,
    (Membership.COUNTED, MembershipEvent.ALONE): Membership.COUNTED,
    (Membership.COUNTED, MembershipEvent.STRAY_LEASE): Membership.REBUILDING,
    (Membership.COUNTED, MembershipEvent.LEASES_OVER): Membership.ENTERED,
    (Membership.REBUILDING, MembershipEvent.ALONE): Membership.REBUILDING,
    (Membership.REBUILDING, MembershipEvent.STRAY_LEASE): Membership.REBUILDING,
    (Membership.REBUILDING, MembershipEvent.LEASES_OVER): Membership.ENTERED,
    (Membership.ENTERED, MembershipEvent.ALONE): Membership.ENTERED,
    (Membership.ENTERED, MembershipEvent.STRAY_LEASE): Membership.ENTERED,
    (Membership.ENTERED, MembershipEvent.LEASES_OVER): Membership.ENTERED,
}


class ClusterNodes:
    """The cluster's nodes, to the knowledge of a single master."""

    def __init__(self, now_s: float, rebuild_s: float = REBUILD_S) -> None:
        self.state = Membership.FRESH
        self._alone_s = now_s + min(ALONE_S, rebuild_s)
        self._leases_over_s = now_s + rebuild_s

    def handle(self, event: MembershipEvent) -> None:
        """Take ``event``."""
        self.state = TRANSITIONS[self.state, event]

    def tick(self, now_s: float) -> None:
        """Advance the time to ``now_s``."""
        if now_s >= self._alone_s:
            self.handle(MembershipEvent.ALONE)
        if now_s >= self._leases_over_s:
            self.handle(MembershipEvent.LEASES_OVER)

    def are_all(self, node_ids: Set[str]) -> bool:
        """Return whether the registered nodes ``node_ids`` are known to be all nodes of the cluster."""
        if self.state is Membership.COUNTED:
            return bool(node_ids)
        return self.state is Membership.ENTERED

    def __repr__(self) -> str:
        return f"ClusterNodes({self.state.name})"


class NodesInEtcd:
    """The cluster's nodes according to etcd, for every master: those admitted by a leader.

    If no leader has admitted any, etcd may have been set up anew beneath nodes that hold chunks; then a master knows
    nothing until each of them has had the time of a lease to arrive.
    """

    def __init__(self, now_s: float, rebuild_s: float = REBUILD_S) -> None:
        self._rebuild_s = rebuild_s
        self._sure_s: float | None = None  # start of the wait; None: nothing has come from etcd yet
        self._is_sure = False
        self._admitted: frozenset[str] = frozenset()

    def update(self, admitted: frozenset[str] | None, now_s: float) -> None:
        """Take the ids of all admitted nodes; None if no leader has admitted any yet."""
        if self._sure_s is None:
            self._sure_s = now_s if admitted is not None else now_s + self._rebuild_s
        self._admitted = admitted or frozenset()
        self.tick(now_s)

    def handle(self, event: MembershipEvent) -> None:
        """Do nothing: etcd alone decides."""

    def tick(self, now_s: float) -> None:
        """Advance the time during which nodes unknown to etcd may arrive."""
        self._is_sure = self._is_sure or (self._sure_s is not None and now_s >= self._sure_s)

    def are_all(self, node_ids: Set[str]) -> bool:
        """Return whether the registered nodes ``node_ids`` are known to be all nodes of the cluster."""
        return self._is_sure and self._admitted <= node_ids

    def __repr__(self) -> str:
        return f"NodesInEtcd({len(self._admitted)}, {'sure' if self._is_sure else 'not sure yet'})"


class Rebuild:
    """The slots of one range known to this master.

    ``is_rebuilt``: all of them have been known since the range came to this master. From then on it is reported to
    followers, even while a newly arrived node has yet to report its chunks.
    """

    __slots__ = ("_first_slot", "is_rebuilt", "num_known_slots")

    def __init__(self, range_number: int) -> None:
        #: Number of known slots of the range, from its first one on.
        self.num_known_slots = 0
        self.is_rebuilt = False
        self._first_slot = range_number * RANGE_SLOTS

    @property
    def is_ready(self) -> bool:
        """Whether every unknown key of the range is a missing key."""
        return self.num_known_slots == RANGE_SLOTS

    def knows(self, key: str) -> bool:
        """Return whether ``key``, of this range, is missing if it is unknown."""
        return self.num_known_slots == RANGE_SLOTS or slot_of(key) < self._first_slot + self.num_known_slots

    def update(self, num_slots: int) -> None:
        """Record that all nodes of the cluster have reported the first ``num_slots`` slots of the range."""
        self.num_known_slots = num_slots
        self.is_rebuilt = self.is_rebuilt or self.is_ready

    def __repr__(self) -> str:
        return f"Rebuild({self.num_known_slots} of {RANGE_SLOTS} slots)"


class ReportedSlots:
    """The number of leading slots of each range that the nodes have reported.

    They are counted, so that finding the minimum of a range takes no walk over all nodes, and kept by range, so that
    forgetting one takes none either. A node not named in a range does not count there. The slots of a node's earlier
    reports count until a later report ends.
    """

    def __init__(self) -> None:
        self._num_nodes = 0
        self._reported: list[dict[str, int]] = [{} for _ in range(NUM_RANGES)]  # by range: in each node's last report
        self._most: list[dict[str, int]] = [{} for _ in range(NUM_RANGES)]  # the same in its longest report
        self._counts = [[0] * (RANGE_SLOTS + 1) for _ in range(NUM_RANGES)]  # by range, and by slots: nodes

    def enter(self, node_id: str, empty: Iterable[int] = ()) -> None:
        """Enter a node that holds nothing of the ranges ``empty``."""
        self._num_nodes += 1
        for number in empty:
            self.report(node_id, number, RANGE_SLOTS)

    def leave(self, node_id: str) -> None:
        """Remove a node."""
        self._num_nodes -= 1
        for reported, most, counts in zip(self._reported, self._most, self._counts, strict=True):
            reported.pop(node_id, None)
            num_slots = most.pop(node_id, None)
            if num_slots is not None:
                counts[num_slots] -= 1

    def begin(self, node_id: str, number: int) -> None:
        """Record that the node begins to report that range."""
        self._reported[number][node_id] = 0

    def report(self, node_id: str, number: int, num_slots: int) -> None:
        """Record that the node has reported ``num_slots`` slots of that range."""
        most, counts = self._most[number], self._counts[number]
        self._reported[number][node_id] = num_slots
        before = most.get(node_id)
        if before is None or before < num_slots:
            if before is not None:
                counts[before] -= 1
            most[node_id] = num_slots
            counts[num_slots] += 1

    def forget(self, number: int) -> None:
        """Discard all reported slots of that range."""
        self._reported[number], self._most[number], self._counts[number] = {}, {}, [0] * (RANGE_SLOTS + 1)

    def reported(self, node_id: str, number: int) -> int | None:
        """Return the number of slots in the node's last report of that range; None: no report of it has begun."""
        return self._reported[number].get(node_id)

    def unreported(self, node_id: str, numbers: Iterable[int]) -> list[int]:
        """Return those of the ranges that the node's last report has not completed."""
        reported = self._reported
        return [number for number in numbers if reported[number].get(node_id) != RANGE_SLOTS]

    def least(self, number: int) -> int:
        """Return the number of slots of that range reported by all nodes; all of them if there is no node."""
        counts = self._counts[number]
        if counts[RANGE_SLOTS] == self._num_nodes:
            return RANGE_SLOTS
        if len(self._most[number]) < self._num_nodes:
            return 0
        return next(num_slots for num_slots, num_nodes in enumerate(counts) if num_nodes)

    def check(self, node_ids: Set[str]) -> None:
        """Assert that the counts match the nodes, and that only ``node_ids`` are named."""
        assert self._num_nodes == len(node_ids)
        for reported, most, counts in zip(self._reported, self._most, self._counts, strict=True):
            assert most.keys() | reported.keys() <= node_ids
            assert all(num_slots <= most.get(node_id, 0) for node_id, num_slots in reported.items())
            assert sum(counts) == len(most)
            assert all(counts[num_slots] == num_nodes for num_slots, num_nodes in Counter(most.values()).items())
