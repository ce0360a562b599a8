"""The directory: which node holds which key, as the nodes announce it. Pure: events and a time in, data out.

The node is the truth about what it holds; this is its mirror, rebuilt from reports when the master is new. Owns the
node records, the chunk table, the tombstones and the log of changes. Knows no lease, socket, clock or protobuf.

Rules of an announcement, which comes from a registered node and carries its generation:
- a node that is not registered, or registered with another generation (a zombie), is refused;
- what it removed or deleted is taken out first, then what it added is put in; the last word on a key counts;
- of concurrent puts of a key the first announced version wins while a live node holds it; others get accepted=False
  and drop their copy; the same version on another node is a replica;
- a deleted version leaves a tombstone: a node that was cut off and comes back with it gets accepted=False;
- what a client has committed (see pending_commits) counts as announced till its node speaks; others ask again till
  then. The node retracts that version only, and only while its commit is pending;
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
from tanghulu.store.master.directory.announcement import (
    Announced,
    ChunkEntry,
    NodeAnnouncement,
    ReportPart,
    StaleHolder,
)
from tanghulu.store.master.directory.chunk_table import DirectoryTable, FoundChunk, Outcome, Slot, TableSlotState
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.listing import KeyPage
from tanghulu.store.master.directory.pending_commits import PendingCommits
from tanghulu.store.master.directory.placement import PlacementCandidate, PlacementRequest, place
from tanghulu.store.master.directory.rebuild import REBUILD_S, Rebuild, RebuildEvent
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.types import ClientCommit, CommitResult

MAX_TOMBSTONES = 1 << 16
#: Keys and events that the log keeps for followers: about 8 bytes each while the keys live.
LOG_WEIGHT = 1 << 20


@dataclass(slots=True)
class NodeRecord:
    """A registered node. The last of ``slots`` is current; a report under way replaces those before it."""

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
        """Whether the node takes no new chunks, as its registration says."""
        return self.instance.attributes.get("draining") == "true"


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """A registered node with its figures, as callers see it."""

    instance: Instance
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    draining: bool
    last_seen_s: float = field(compare=False)
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0


class Directory:
    """The map from keys to nodes; see the module. ``now_s`` is of one monotonic clock in all calls.

    The directory is complete when the nodes in ``expected`` (None: unknown) have reported, or the time is up.
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
        self._table = DirectoryTable()
        self._nodes: dict[str, NodeRecord] = {}
        self._tombstones: OrderedDict[str, int] = OrderedDict()
        self.pending_commits = PendingCommits()
        self._stale_holders: list[StaleHolder] = []  # until the planner takes them, in the same call

    @property
    def num_keys(self) -> int:
        """Number of keys; keys of a lost node count until they are swept."""
        return len(self._table)

    @property
    def num_nodes(self) -> int:
        """Number of registered nodes."""
        return len(self._nodes)

    # --- nodes

    def node_registered(self, instance: Instance, now_s: float) -> None:
        """Enter a node, or its changed registration. Another generation of the same id starts with nothing."""
        node = self._nodes.get(instance.id)
        if node is not None and node.instance.generation == instance.generation:
            node.instance, node.last_seen_s = instance, now_s
            return
        if node is not None:
            self.node_gone(instance.id)
        self._nodes[instance.id] = NodeRecord(instance, now_s, [self._table.open_slot(instance.id)])

    def node_seen(self, node_id: str, now_s: float) -> None:
        """Note a sign of life of a node."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.last_seen_s = now_s

    def node_gone(self, node_id: str) -> None:
        """Forget a node whose lease ended: nobody finds its chunks from now on."""
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        self._table.forget_owner(node_id)
        self.pending_commits.forget_node(node_id)
        self._log(DirectoryEventKind.NODE_GONE, node_id)
        self._check_all_reported()

    def nodes(self) -> list[NodeSummary]:
        """All registered nodes, by id."""
        return [self._view(self._nodes[node_id]) for node_id in sorted(self._nodes)]

    def _view(self, node: NodeRecord) -> NodeSummary:
        return NodeSummary(
            node.instance,
            node.capacity_bytes,
            node.used_bytes,
            self.num_chunks(node.instance.id),
            node.draining,
            node.last_seen_s,
            node.ssd_capacity_bytes,
            node.ssd_used_bytes,
        )

    # --- announcements of nodes

    def announce(self, announcement: NodeAnnouncement, now_s: float) -> Announced:
        """Take an announcement. Raises LeaseExpired (register first) or InvalidRequest (a zombie's generation)."""
        node = self._speaker(announcement)
        node.last_seen_s = now_s
        if announcement.capacity_bytes:
            node.capacity_bytes, node.used_bytes = announcement.capacity_bytes, announcement.used_bytes
            node.ssd_capacity_bytes, node.ssd_used_bytes = announcement.ssd_capacity_bytes, announcement.ssd_used_bytes
        if announcement.report is ReportPart.BEGIN:
            node.slots.append(self._table.open_slot(announcement.node_id))
            node.reporting = True
        changes: dict[str, bool] = {}  # key -> whether followers must now think that the node holds it
        self._take_out(announcement, changes)
        accepted = [self._put_in(node.slots[-1], announcement.node_id, entry, changes) for entry in announcement.added]
        undecided = [
            i for i, each in enumerate(announcement.added) if not accepted[i] and each.key in self.pending_commits
        ]
        self._log_changes(announcement.node_id, changes)
        if announcement.report is ReportPart.END and node.reporting:
            self._end_report(node)
        return Announced(accepted, not node.reported and not node.reporting, undecided)

    def _speaker(self, announcement: NodeAnnouncement) -> NodeRecord:
        node = self._nodes.get(announcement.node_id)
        if node is None:
            raise LeaseExpired(f"node {announcement.node_id} is not registered at this master; register, then announce")
        if node.instance.generation != announcement.generation:
            raise InvalidRequest(
                f"node {announcement.node_id} is registered with generation {node.instance.generation}, "
                f"not {announcement.generation}: another process took its place"
            )
        return node

    def _take_out(self, announcement: NodeAnnouncement, changes: dict[str, bool]) -> None:
        for key, version in announcement.retracted:
            if self.pending_commits.retract(key, announcement.node_id, version):
                self._take_back(key, announcement.node_id, version)
        for key in announcement.deleted:
            self._bury(key, announcement.node_id)
        for keys in (announcement.removed, announcement.deleted):
            for key in keys:
                self.pending_commits.settle(key, announcement.node_id)
                if self._table.remove(announcement.node_id, key):
                    changes[key] = False

    def _bury(self, key: str, node_id: str) -> None:
        """Take a removed chunk from its other holders too, and leave a tombstone, so that none brings it back."""
        found = self._table.find(key)
        if found is not None:
            for other in found.node_ids:
                if other != node_id and self._table.remove(other, key):
                    self._log(DirectoryEventKind.REMOVED, other, (key,))
                    self._stale_holders.append(StaleHolder(other, key, found.version))
            self._tombstones[key] = found.version
            self._tombstones.move_to_end(key)
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def _put_in(self, slot: Slot, node_id: str, entry: ChunkEntry, changes: dict[str, bool]) -> bool:
        key, version, size_bytes, cold = entry
        self.pending_commits.settle(key, node_id)
        if self._tombstones and self._tombstones.get(key) == version:
            if self._table.remove(node_id, key):
                changes[key] = False
            return False
        outcome = self._table.add(slot, key, version, size_bytes, cold=cold)
        if outcome in (Outcome.STORED, Outcome.REFUSED_LOST):
            changes[key] = outcome is Outcome.STORED
        return outcome in (Outcome.STORED, Outcome.KEPT)

    def _end_report(self, node: NodeRecord) -> None:
        # The node does not know of its pending commits yet, so they are in no report.
        for key, commit in self.pending_commits.of(node.instance.id):
            self._table.add(node.slots[-1], key, commit.version, commit.size_bytes)
        for slot in node.slots[:-1]:
            self._table.kill_slot(slot, TableSlotState.REPLACED)
        node.slots, node.reporting, node.reported = node.slots[-1:], False, True
        self._check_all_reported()

    def _check_all_reported(self) -> None:
        if self._nodes and self._expected <= self._nodes.keys() and all(n.reported for n in self._nodes.values()):
            self.rebuild.handle(RebuildEvent.ALL_REPORTED)

    # --- commits of clients

    def commit_by_client(self, said: ClientCommit, now_s: float) -> CommitResult:
        """Take a client's commit as the announcement of its node, until the node itself announces the chunk."""
        node = self._nodes.get(said.node_id)
        if node is None or node.instance.generation != said.generation or node.draining or self.pending_commits.full:
            return CommitResult.ASK_NODE
        key, version = said.key, said.version
        if not self.rebuild.is_ready or self._tombstones.get(key) == version:
            return CommitResult.ASK_NODE
        found = self._table.find(key)
        if found is not None:
            return (
                CommitResult.ASK_NODE
                if said.node_id in found.node_ids or key in self.pending_commits
                else CommitResult.EXISTS
            )
        self._table.add(node.slots[-1], key, version, said.size_bytes)
        self.pending_commits.make(key, said.node_id, version, said.size_bytes, now_s)
        self._log(DirectoryEventKind.STORED, said.node_id, (key,))
        return CommitResult.ACCEPTED

    def _take_back(self, key: str, node_id: str, version: int) -> None:
        """Remove a chunk whose pending commit the node has not confirmed, or has retracted."""
        found = self._table.find(key)
        if found is not None and found.version == version and self._table.remove(node_id, key):
            self._log(DirectoryEventKind.REMOVED, node_id, (key,))

    @property
    def has_stale_holders(self) -> bool:
        """Whether nodes still hold chunks that were removed elsewhere."""
        return bool(self._stale_holders)

    def take_stale_holders(self) -> list[StaleHolder]:
        """The nodes that hold chunks which were removed elsewhere, each once."""
        taken, self._stale_holders = self._stale_holders, []
        return taken

    # --- questions of callers

    def locate(self, keys: Iterable[str]) -> list[FoundChunk | None]:
        """For each key the chunk and its live holders. None is a "not found" only if ``rebuild.is_ready``."""
        return list(map(self._table.find, keys))

    def holds(self, keys: Iterable[str]) -> bytes:
        """For each key 1 if a live node holds it, else 0. A 0 is a "not found" only if ``rebuild.is_ready``."""
        return self._table.holds(keys)

    def place(self, request: PlacementRequest, rng: Random) -> list[NodeSummary]:
        """The nodes for a new chunk, best first (see placement)."""
        return [self._view(self._nodes[c.node_id]) for c in place(list(self.candidates().values()), request, rng)]

    def candidates(self) -> dict[str, PlacementCandidate]:
        """The nodes as placement sees them, by id."""
        return {
            node_id: PlacementCandidate(node_id, n.instance.place, n.capacity_bytes, n.used_bytes, n.draining)
            for node_id, n in self._nodes.items()
        }

    def instance(self, node_id: str) -> Instance | None:
        """The registration of ``node_id``; None if it is not registered."""
        node = self._nodes.get(node_id)
        return node.instance if node is not None else None

    def num_chunks(self, node_id: str) -> int:
        """Number of chunks that the node holds, as far as it has reported."""
        node = self._nodes.get(node_id)
        return sum(map(self._table.count, node.slots)) if node is not None else 0

    def find(self, key: str) -> FoundChunk | None:
        """The chunk ``key`` and its live holders, as ``locate`` of one key."""
        return self._table.find(key)

    def list_keys(self, prefix: str, after: str, limit: int) -> KeyPage:
        """A page of the keys that begin with ``prefix`` (see key_pages), and whether there are more."""
        return key_pages.list_keys(self._table, prefix, after, limit)

    def snapshot(self, prefix: str, after: str, num_keys: int) -> tuple[dict[str, list[str]], str | None]:
        """A page of a snapshot for followers (see key_pages)."""
        return key_pages.snapshot(self._table, prefix, after, num_keys)

    # --- time

    def tick(self, now_s: float) -> None:
        """Let deadlines pass: pending commits, the rebuild."""
        for key, commit in self.pending_commits.expired(now_s):
            self._take_back(key, commit.node_id, commit.version)
        self.rebuild.tick(now_s)
        self._check_all_reported()
        self._table.settle()

    def sweep(self, num_keys: int) -> bool:
        """Clean the next ``num_keys`` keys of lost nodes and replaced reports; returns whether there is more."""
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
        """Assert that all parts are sound, and that every live slot belongs to a node."""
        self._table.check()
        self.log.check()
        self.pending_commits.check()
        assert len(self._tombstones) <= MAX_TOMBSTONES
        for node_id, node in self._nodes.items():
            assert node.instance.id == node_id
            assert len(node.slots) == 1 or (node.reporting and node.slots)
            for slot in node.slots:
                assert self._table.owner(slot) == node_id

    def __repr__(self) -> str:
        return f"Directory({self.rebuild.state.name}, {len(self._nodes)} nodes, {len(self._table)} keys)"
