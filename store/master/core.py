"""The master's two memories as one: instances under leases, and the directory of the nodes among them. Pure.

Every call receives the time; changes wait in two rings (``members`` and ``directory.log``) for their followers. The
driver around it (``MasterServer`` and the calls in ``rpc``) passes calls in, ticks, and wakes the followers.

If several masters share the ranges of keys, all of them get the nodes from etcd; leases are the leader's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from random import Random

from tanghulu.discovery.base import Instance, InstanceEvent
from tanghulu.discovery.leases import LeaseTable
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import REBUILD_S, MembershipEvent, NodesInEtcd
from tanghulu.store.master.replication.orders import Copy
from tanghulu.store.master.replication.planner import CopyPlanner
from tanghulu.store.protocol.announcements import AnnounceReply, DropOrder, NodeAnnouncement
from tanghulu.types import Role

#: Bytes of changes of instances kept for watchers.
MEMBERS_BYTES = 8 << 20
_EVENT_BYTES = 64
#: Rate at which copies may move through one node.
COPY_RATE_BYTES_S = float(256 << 20)
#: A node is gone if its connection broke and it neither connects nor renews its lease within this time.
LOST_GRACE_S = 1.0
#: A tick this late means that the master was stopped, not that all others died.
STALL_S = 0.5
#: Tenants that one node may name.
MAX_TENANTS = 4096


class TenantTotals:
    """Bytes by node of the tenants with a quota for the whole cluster, as reported by the nodes once a second.

    The nodes enforce the quota; the master only adds up what each node needs about the others. This is soft state: a
    new master has it within a second, and bytes held by a departed node no longer count.
    """

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, int]] = {}

    def update(self, node_id: str, held: Mapping[str, int]) -> None:
        """Replace the bytes of ``node_id``; tenants missing from ``held`` hold nothing there."""
        self._by_node[node_id] = dict(list(held.items())[:MAX_TENANTS])

    def elsewhere(self, node_id: str, alive: Container[str]) -> dict[str, int]:
        """Return bytes of the tenants of ``node_id`` on the other ``alive`` nodes; forget all other nodes."""
        for gone in [each for each in self._by_node if each not in alive]:
            del self._by_node[gone]
        others = [held for each, held in self._by_node.items() if each != node_id]
        return {tenant: sum(held.get(tenant, 0) for held in others) for tenant in self._by_node.get(node_id, ())}

    def __repr__(self) -> str:
        return f"TenantTotals({len(self._by_node)} nodes)"


class Master:
    """Leases and directory, kept in step: a node is in the directory while its lease is valid."""

    def __init__(
        self,
        generation: int,
        now_s: float,
        rebuild_s: float = REBUILD_S,
        copy_rate_bytes_s: float = COPY_RATE_BYTES_S,
        rng: Random | None = None,
        *,
        shares: bool = False,
    ) -> None:
        self._shares = shares
        self._rebuild_s = rebuild_s
        self._connections: Counter[str] = Counter()  # announcement connections of nodes
        in_etcd = NodesInEtcd(now_s, rebuild_s) if shares else None
        self.directory = RangeDirectories(now_s, rebuild_s, cluster=in_etcd)
        self.copies = CopyPlanner(self.directory, copy_rate_bytes_s, rng or Random(generation), now_s)
        self._last_tick_s = now_s
        self.log_generation = generation  # of the directory and its log, which outlive a change of the leader
        self.begin_leases(generation, now_s)

    def begin_leases(self, generation: int, now_s: float) -> None:
        """Begin as another ``generation`` with the leader's state only; the directory stays as it is."""
        self.generation = generation
        self.leases = LeaseTable()
        self.tenants = TenantTotals()
        self.members: EventRing[InstanceEvent] = EventRing(MEMBERS_BYTES)
        self._leases_over_s = now_s + self._rebuild_s
        self._came: set[str] = set()  # the nodes that have had a lease of this generation, if several masters share

    def update_nodes(self, nodes: Mapping[str, Instance], admitted: frozenset[str] | None, now_s: float) -> None:
        """Take the nodes from etcd, and the ids of all admitted ones; None if none was ever admitted."""
        assert self._shares
        assert isinstance(self.directory.cluster, NodesInEtcd)
        self.directory.cluster.update(admitted, now_s)
        self._came.intersection_update(nodes)
        for node_id in [each for each in self.directory.candidates() if each not in nodes]:
            self.directory.node_gone(node_id)
        for node_id, instance in nodes.items():
            if self.directory.instance(node_id) != instance:
                self.directory.node_registered(instance, now_s)

    def present_nodes(self, admitted: frozenset[str], now_s: float) -> frozenset[str]:
        """Return the admitted nodes that are present to a leader's knowledge: the others have left.

        A node that has yet to find a new leader counts as present while it announces to this master as the owner of
        some keys.
        """
        if now_s < self._leases_over_s:
            return admitted
        return frozenset(node_id for node_id in admitted if self.leases.holds(node_id) or self._comes(node_id, now_s))

    def _comes(self, node_id: str, now_s: float) -> bool:
        seen_s = None if node_id in self._came else self.directory.last_seen_s(node_id)
        return seen_s is not None and now_s < seen_s + self._rebuild_s

    def register(self, instance: Instance, ttl_s: float, now_s: float, owner: str = "") -> int:
        """Enter or replace an instance of the token ``owner``; return its lease id.

        Raises InvalidRequest, Conflict or Overloaded.
        """
        lease_id = self.leases.register(instance, ttl_s, now_s, owner)
        if self._shares:  # etcd notifies every master
            if instance.role is Role.NODE:
                self._came.add(instance.id)
        elif instance.role is Role.NODE:
            self.directory.node_registered(instance, now_s)
        self._publish_members()
        return lease_id

    def keep_alive(self, instance_id: str, lease_id: int, now_s: float, owner: str = "") -> bool:
        """Renew a lease; False makes the instance register again."""
        if not self.leases.keep_alive(instance_id, lease_id, now_s, owner):
            self.directory.cluster.handle(MembershipEvent.STRAY_LEASE)  # does nothing if etcd has the nodes
            return False
        self.directory.node_seen(instance_id, now_s)
        return True

    def deregister(self, instance_id: str, lease_id: int, owner: str = "") -> bool:
        """End a lease now; False if it is not one of this master's."""
        if not self.leases.deregister(instance_id, lease_id, owner):
            return False
        if not self._shares:
            self.directory.node_gone(instance_id)
        self._publish_members()
        return True

    def connection_made(self, node_id: str, now_s: float) -> None:
        """Record that a node is alive: it announced over a new connection, and may have missed an answer."""
        self._connections[node_id] += 1
        self.leases.prolong(node_id, now_s)
        self.copies.orders.repeat_drops(node_id)

    def connection_lost(self, node_id: str, now_s: float) -> None:
        """Shorten the lease of a node whose last announcement connection broke: it must soon prove to be alive.

        At one of several masters it may have two, for the leader and for the owner of some keys.
        """
        self._connections[node_id] -= 1
        if self._connections[node_id] > 0:
            return
        del self._connections[node_id]
        self.leases.shorten(node_id, now_s + LOST_GRACE_S)

    def announce(self, announcement: NodeAnnouncement, now_s: float) -> AnnounceReply:
        """Take a node's announcement (see RangeDirectories.announce), which proves that the node is alive.

        ``orders_for`` then has the node's orders.
        """
        answer = self.directory.announce(announcement, now_s)
        self.leases.prolong(announcement.node_id, now_s)
        return answer

    def orders_for(self, announcement: NodeAnnouncement, now_s: float) -> tuple[list[Copy], list[DropOrder]] | None:
        """Return the orders for the announcing node: chunks to copy and to drop. Usually None, if there are none."""
        return self.copies.orders_for(announcement, now_s) if self.copies.concerns(announcement) else None

    def plan(self, now_s: float, num_keys: int) -> None:
        """Check ``num_keys`` keys for copies to make; does nothing before the directory is complete."""
        if self.directory.is_ready:
            self.copies.walk(now_s, num_keys)

    def tick(self, now_s: float, period_s: float) -> list[Instance]:
        """End expired leases and waits; return the instances whose lease expired. Called every ``period_s``."""
        late_s = now_s - self._last_tick_s - period_s
        self._last_tick_s = now_s
        if late_s > STALL_S:
            self.leases.forgive(late_s)
        expired = self.leases.expire(now_s)
        for instance in expired if not self._shares else ():
            self.directory.node_gone(instance.id)
        self.directory.tick(now_s)
        self._publish_members()
        return expired

    def _publish_members(self) -> None:
        for event in self.leases.take_events():
            self.members.append(event, _EVENT_BYTES if event.instance is None else event.instance.num_bytes)

    def check(self) -> None:
        """Assert that both parts are sound, and that the directory's nodes are exactly those with a lease."""
        self.leases.check()
        self.directory.check()
        self.members.check()
        self.copies.check()
        nodes = [instance.id for instance in self.leases.instances() if instance.role is Role.NODE]
        assert self._shares or nodes == [view.instance.id for view in self.directory.nodes()]
