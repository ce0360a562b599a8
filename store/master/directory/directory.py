"""The directory: which node holds which key, as the nodes announce it. Pure: events and a time in, data out.

The node is the truth about what it holds; this is its mirror, rebuilt from reports when the master is new. Owns the
node records, the chunk table, the tombstones and the log of changes. Knows no lease, socket, clock or protobuf.

Rules of an announcement, which comes from a registered node and carries its generation:
- a node that is not registered, or registered with another generation (a zombie), is refused;
- what it removed or deleted is taken out first, then what it added is put in; the last word on a key counts;
- of concurrent puts of a key the first announced version wins while a live node holds it; others get accepted=False
  and drop their copy; the same version on another node is a replica;
- a deleted version leaves a tombstone: a node that was cut off and comes back with it gets accepted=False;
- what a client has proclaimed (see promises) counts as announced till its node speaks; others ask again meanwhile.
  The node withdraws that version only, and only while it is promised;
- REPORT BEGIN opens a new slot, the pieces and all later announcements go into it, and at END what only the older slots
  hold is gone. Until END nothing is forgotten. END without its BEGIN (the master restarted in between) proves nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from tanghulu.discovery.base import Instance
from tanghulu.errors import InvalidRequest, LeaseExpired
from tanghulu.store.master.directory import listing as key_pages
from tanghulu.store.master.directory.announcement import Announced, Announcement, ChunkEntry, Report
from tanghulu.store.master.directory.chunk_table import ChunkTable, Found, Outcome, Slot, SlotState
from tanghulu.store.master.directory.copy_orders import Bereft
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.listing import KeyListing
from tanghulu.store.master.directory.pending_commits import Promises
from tanghulu.store.master.directory.placement import Candidate, Wish, place
from tanghulu.store.master.directory.rebuild import REBUILD_S, Rebuild, RebuildEvent
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.types import Proclamation, Verdict

MAX_TOMBSTONES = 1 << 16
#: Keys and events that the log keeps for followers: about 8 bytes each while the keys live.
LOG_WEIGHT = 1 << 20


@dataclass(slots=True)
class Node:
    """A registered node. ``slots``: the current one last; those before it are being replaced by a report under way."""

    instance: Instance
    last_seen_s: float
    slots: list[Slot]
    capacity_bytes: int = 0
    used_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0
    reporting: bool = False
    reported: bool = False

    @property
    def draining(self) -> bool:
        """Whether it takes no new chunks; the node says so in its registration."""
        return self.instance.attributes.get("draining") == "true"


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as callers see it."""

    instance: Instance
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    draining: bool
    last_seen_s: float = field(compare=False)
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0


class Directory:
    """See the module. ``now_s`` is any monotonic time, the same clock in every call.

    It is not complete before the nodes in ``expected`` (None: unknown) have reported, or the time is up.
    """

    def __init__(
        self,
        now_s: float,
        rebuild_s: float = REBUILD_S,
        log_weight: int = LOG_WEIGHT,
        expected: frozenset[str] | None = None,
    ) -> None:
        self._expected = expected or frozenset()
        self.rebuild = Rebuild(now_s, rebuild_s, counted=expected is not None)
        self.log: EventRing[DirectoryEvent] = EventRing(log_weight)
        self._table = ChunkTable()
        self._nodes: dict[str, Node] = {}
        self._tombstones: OrderedDict[str, int] = OrderedDict()
        self.promises = Promises()
        self._bereft: list[Bereft] = []  # until the planner takes them, in the same call

    @property
    def num_keys(self) -> int:
        """Number of keys; those of a lost node count until they are swept."""
        return len(self._table)

    @property
    def num_nodes(self) -> int:
        """Number of registered nodes."""
        return len(self._nodes)

    # --- nodes

    def node_registered(self, instance: Instance, now_s: float) -> None:
        """A node registered or changed its registration. Another generation of the same id starts with nothing."""
        node = self._nodes.get(instance.id)
        if node is not None and node.instance.generation == instance.generation:
            node.instance, node.last_seen_s = instance, now_s
            return
        if node is not None:
            self.node_gone(instance.id)
        self._nodes[instance.id] = Node(instance, now_s, [self._table.open_slot(instance.id)])

    def node_seen(self, node_id: str, now_s: float) -> None:
        """A sign of life that carries nothing else."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.last_seen_s = now_s

    def node_gone(self, node_id: str) -> None:
        """The node's lease ended: nobody finds its chunks from now on."""
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        self._table.forget_owner(node_id)
        self.promises.forget_node(node_id)
        self._log(DirectoryEventKind.NODE_GONE, node_id)
        self._check_all_reported()

    def nodes(self) -> list[NodeView]:
        """All registered nodes, by id."""
        return [self._view(self._nodes[node_id]) for node_id in sorted(self._nodes)]

    def _view(self, node: Node) -> NodeView:
        return NodeView(
            node.instance,
            node.capacity_bytes,
            node.used_bytes,
            self.num_chunks(node.instance.id),
            node.draining,
            node.last_seen_s,
            node.ssd_capacity_bytes,
            node.ssd_used_bytes,
        )

    # --- what nodes say

    def announce(self, announcement: Announcement, now_s: float) -> Announced:
        """Take what a node says. Raises LeaseExpired (register first) or InvalidRequest (a zombie's generation)."""
        node = self._speaker(announcement)
        node.last_seen_s = now_s
        if announcement.capacity_bytes:
            node.capacity_bytes, node.used_bytes = announcement.capacity_bytes, announcement.used_bytes
            node.ssd_capacity_bytes, node.ssd_used_bytes = announcement.ssd_capacity_bytes, announcement.ssd_used_bytes
        if announcement.report is Report.BEGIN:
            node.slots.append(self._table.open_slot(announcement.node_id))
            node.reporting = True
        changes: dict[str, bool] = {}  # key -> whether followers must now think that the node holds it
        self._take_out(announcement, changes)
        accepted = [self._put_in(node.slots[-1], announcement.node_id, entry, changes) for entry in announcement.added]
        undecided = [i for i, each in enumerate(announcement.added) if not accepted[i] and each.key in self.promises]
        self._log_changes(announcement.node_id, changes)
        if announcement.report is Report.END and node.reporting:
            self._end_report(node)
        return Announced(accepted, not node.reported and not node.reporting, undecided)

    def _speaker(self, announcement: Announcement) -> Node:
        node = self._nodes.get(announcement.node_id)
        if node is None:
            raise LeaseExpired(f"node {announcement.node_id} is not registered at this master; register, then announce")
        if node.instance.generation != announcement.generation:
            raise InvalidRequest(
                f"node {announcement.node_id} is registered with generation {node.instance.generation}, "
                f"not {announcement.generation}: another process took its place"
            )
        return node

    def _take_out(self, announcement: Announcement, changes: dict[str, bool]) -> None:
        for key, version in announcement.withdrawn:
            if self.promises.withdraw(key, announcement.node_id, version):
                self._take_back(key, announcement.node_id, version)
        for key in announcement.deleted:
            self._bury(key, announcement.node_id)
        for keys in (announcement.removed, announcement.deleted):
            for key in keys:
                self.promises.settle(key, announcement.node_id)
                if self._table.remove(announcement.node_id, key):
                    changes[key] = False

    def _bury(self, key: str, node_id: str) -> None:
        """The chunk was removed: its other holders shall not have it either, and none may bring it back."""
        found = self._table.find(key)
        if found is not None:
            for other in found.node_ids:
                if other != node_id and self._table.remove(other, key):
                    self._log(DirectoryEventKind.REMOVED, other, (key,))
                    self._bereft.append(Bereft(other, key, found.version))
            self._tombstones[key] = found.version
            self._tombstones.move_to_end(key)
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def _put_in(self, slot: Slot, node_id: str, entry: ChunkEntry, changes: dict[str, bool]) -> bool:
        key, version, size_bytes, cold = entry
        self.promises.settle(key, node_id)
        if self._tombstones and self._tombstones.get(key) == version:
            if self._table.remove(node_id, key):
                changes[key] = False
            return False
        outcome = self._table.add(slot, key, version, size_bytes, cold=cold)
        if outcome in (Outcome.STORED, Outcome.REFUSED_LOST):
            changes[key] = outcome is Outcome.STORED
        return outcome in (Outcome.STORED, Outcome.KEPT)

    def _end_report(self, node: Node) -> None:
        for key, promise in self.promises.of(node.instance.id):  # it does not know of them yet: they are in no report
            self._table.add(node.slots[-1], key, promise.version, promise.size_bytes)
        for slot in node.slots[:-1]:
            self._table.kill_slot(slot, SlotState.REPLACED)
        node.slots, node.reporting, node.reported = node.slots[-1:], False, True
        self._check_all_reported()

    def _check_all_reported(self) -> None:
        if self._nodes and self._expected <= self._nodes.keys() and all(n.reported for n in self._nodes.values()):
            self.rebuild.handle(RebuildEvent.ALL_REPORTED)

    # --- what clients say of chunks in desks

    def proclaim(self, said: Proclamation, now_s: float) -> Verdict:
        """Take a client's word that a node is about to hold a chunk, as its announcement, until that comes itself."""
        node = self._nodes.get(said.node_id)
        if node is None or node.instance.generation != said.generation or node.draining or self.promises.full:
            return Verdict.ASK_NODE
        key, version = said.key, said.version
        if not self.rebuild.is_ready or self._tombstones.get(key) == version:
            return Verdict.ASK_NODE
        found = self._table.find(key)
        if found is not None:
            return Verdict.ASK_NODE if said.node_id in found.node_ids or key in self.promises else Verdict.EXISTS
        self._table.add(node.slots[-1], key, version, said.size_bytes)
        self.promises.make(key, said.node_id, version, said.size_bytes, now_s)
        self._log(DirectoryEventKind.STORED, said.node_id, (key,))
        return Verdict.ACCEPTED

    def _take_back(self, key: str, node_id: str, version: int) -> None:
        """The promise is not kept."""
        found = self._table.find(key)
        if found is not None and found.version == version and self._table.remove(node_id, key):
            self._log(DirectoryEventKind.REMOVED, node_id, (key,))

    @property
    def has_bereft(self) -> bool:
        """Whether nodes are to be told that what they hold was removed."""
        return bool(self._bereft)

    def take_bereft(self) -> list[Bereft]:
        """Nodes that hold what was removed elsewhere, each once."""
        taken, self._bereft = self._bereft, []
        return taken

    # --- what callers ask

    def locate(self, keys: Iterable[str]) -> list[Found | None]:
        """For each key the chunk and its live holders. None is a "not found" only if ``rebuild.is_ready``."""
        return list(map(self._table.find, keys))

    def holds(self, keys: Iterable[str]) -> bytes:
        """For each key 1 if a live node holds it, else 0; the same of a 0 as of a None of ``locate``."""
        return self._table.holds(keys)

    def place(self, wish: Wish, rng: Random) -> list[NodeView]:
        """Where to put a new chunk, best first (see placement)."""
        return [self._view(self._nodes[c.node_id]) for c in place(list(self.candidates().values()), wish, rng)]

    def candidates(self) -> dict[str, Candidate]:
        """The nodes as placement sees them, by id."""
        return {
            node_id: Candidate(node_id, n.instance.place, n.capacity_bytes, n.used_bytes, n.draining)
            for node_id, n in self._nodes.items()
        }

    def instance(self, node_id: str) -> Instance | None:
        """A registered node."""
        node = self._nodes.get(node_id)
        return node.instance if node is not None else None

    def num_chunks(self, node_id: str) -> int:
        """What the node holds, as far as it has reported."""
        node = self._nodes.get(node_id)
        return sum(map(self._table.count, node.slots)) if node is not None else 0

    def find(self, key: str) -> Found | None:
        """One key of ``locate``."""
        return self._table.find(key)

    def list_keys(self, prefix: str, after: str, limit: int) -> tuple[list[KeyListing], bool]:
        """A page of the keys that begin with ``prefix`` (see key_pages), and whether there are more."""
        return key_pages.list_keys(self._table, prefix, after, limit)

    def snapshot(self, prefix: str, after: str, num_keys: int) -> tuple[dict[str, list[str]], str | None]:
        """A page of a snapshot for followers (see key_pages)."""
        return key_pages.snapshot(self._table, prefix, after, num_keys)

    # --- time

    def tick(self, now_s: float) -> None:
        """Notice deadlines."""
        for key, promise in self.promises.broken(now_s):
            self._take_back(key, promise.node_id, promise.version)
        self.rebuild.tick(now_s)
        self._check_all_reported()
        self._table.settle()

    def sweep(self, num_keys: int) -> bool:
        """Clean up behind lost nodes and replaced reports, ``num_keys`` keys of it; returns whether there is more."""
        by_node: dict[str, dict[str, bool]] = {}
        for node_id, key in self._table.sweep(num_keys):
            by_node.setdefault(node_id, {})[key] = False
        for node_id, changes in by_node.items():
            self._log_changes(node_id, changes)
        return self._table.needs_sweep

    def _log_changes(self, node_id: str, changes: dict[str, bool]) -> None:
        for kind, wanted in ((DirectoryEventKind.REMOVED, False), (DirectoryEventKind.STORED, True)):
            keys = tuple(key for key, held in changes.items() if held is wanted)
            if keys:
                self._log(kind, node_id, keys)

    def _log(self, kind: DirectoryEventKind, node_id: str, keys: tuple[str, ...] = ()) -> None:
        self.log.append(DirectoryEvent(self.log.last + 1, kind, node_id, keys), weight=1 + len(keys))

    def check(self) -> None:
        """All parts are sound, and every live slot belongs to a node."""
        self._table.check()
        self.log.check()
        self.promises.check()
        assert len(self._tombstones) <= MAX_TOMBSTONES
        for node_id, node in self._nodes.items():
            assert node.instance.id == node_id
            assert len(node.slots) == 1 or (node.reporting and node.slots)
            for slot in node.slots:
                assert self._table.owner(slot) == node_id

    def __repr__(self) -> str:
        return f"Directory({self.rebuild.state.name}, {len(self._nodes)} nodes, {len(self._table)} keys)"
