"""The directory: which node holds which key, as the nodes announce it. Pure: events and a time in, data out.

The node is the truth about what it holds; this is its mirror, rebuilt from reports when the master is new. Owns the
node records, the chunk table, the tombstones and the log of changes. Knows no lease, socket, clock or protobuf.

Rules of an announcement, which comes from a registered node and carries its generation:
- a node that is not registered, or registered with another generation (a zombie), is refused;
- what it removed or deleted is taken out first, then what it added is put in; the last word on a key counts;
- of concurrent puts of a key the first announced version wins while a live node holds it; others get accepted=False
  and drop their copy; the same version on another node is a replica;
- of two versions the older one stays: a put that no master has confirmed is not decided (the node asks again) as long
  as its key may have a chunk that has yet to be reported; what a predecessor has confirmed counts at once;
- a removal names the version: one that is told twice does not touch what was put meanwhile;
- a deleted version leaves a tombstone: a node that was cut off and comes back with it gets accepted=False;
- what a client has committed (see pending_commits) counts as announced till its node speaks; others ask again till
  then. The node retracts that version only, and only while its commit is pending;
- a report has a number, and comes slot by slot in numbered pieces. The first announcement with its number opens a new
  inventory, into which its pieces and all later announcements go, and when the last slot is told, what only older
  inventories hold is gone; until then nothing is forgotten. A piece may come twice. One that continues a report which
  this directory does not know proves nothing: the node is asked to begin again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from random import Random

from tanghulu.discovery.base import Instance
from tanghulu.errors import InvalidRequest, LeaseExpired
from tanghulu.store.master.directory import listing as key_pages
from tanghulu.store.master.directory.announcement import (
    Announced,
    ChunkEntry,
    NodeAnnouncement,
    Removal,
    ReportPiece,
    StaleHolder,
)
from tanghulu.store.master.directory.chunk_table import (
    DirectoryTable,
    FoundChunk,
    InventoryId,
    InventoryState,
    Outcome,
)
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.listing import KeyPage
from tanghulu.store.master.directory.pending_commits import PendingCommits
from tanghulu.store.master.directory.placement import PlacementCandidate, PlacementRequest, PlacementTable
from tanghulu.store.master.directory.rebuild import REBUILD_S, Rebuild
from tanghulu.store.master.directory.report_grants import ReportGrants
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.key_slots import NUM_SLOTS
from tanghulu.store.protocol.types import ClientCommit, CommitResult

MAX_TOMBSTONES = 1 << 16
#: Keys and events that the log keeps for followers: about 8 bytes each while the keys live.
LOG_WEIGHT = 1 << 20


@dataclass(slots=True)
class NodeRecord:
    """A registered node. The last of ``inventories`` is current; a report under way replaces those before it.

    ``report_id`` and ``report_number`` are of the last piece of a report that came; -1: none.
    """

    instance: Instance
    last_seen_s: float
    inventories: list[InventoryId]
    capacity_bytes: int = 0
    used_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0
    report_id: int = 0
    report_number: int = -1
    num_told_slots: int = 0
    reported: bool = False

    @property
    def told_slots(self) -> int:
        """How many slots of keys the node has told, from the first on."""
        return NUM_SLOTS if self.reported else self.num_told_slots

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

    ``expected`` are the nodes that may have something to report (None: unknown); ``rebuild`` is how much of it came.
    """

    def __init__(
        self,
        now_s: float,
        rebuild_s: float = REBUILD_S,
        log_weight: int = LOG_WEIGHT,
        expected: frozenset[str] | None = None,
    ) -> None:
        self.rebuild = Rebuild(now_s, rebuild_s, expected)
        self.grants = ReportGrants()
        self.log: EventRing[DirectoryEvent] = EventRing(log_weight)
        self._table = DirectoryTable()
        self._nodes: dict[str, NodeRecord] = {}
        self._placement = PlacementTable()
        self.nodes_version = 1  # changes with the nodes, what they say of themselves, and their capacity
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
            if node.instance != instance:
                self.nodes_version += 1
            node.instance, node.last_seen_s = instance, now_s
            self._offer(node)
            return
        if node is not None:
            self.node_gone(instance.id)
        node = self._nodes[instance.id] = NodeRecord(instance, now_s, [self._table.open_inventory(instance.id)])
        self.nodes_version += 1
        self._offer(node)

    def _offer(self, node: NodeRecord) -> None:
        """Let placement know how the node stands now."""
        instance = node.instance
        self._placement.set(
            PlacementCandidate(instance.id, instance.place, node.capacity_bytes, node.used_bytes, node.draining)
        )

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
        self.nodes_version += 1
        self._placement.remove(node_id)
        self._table.forget_owner(node_id)
        self.pending_commits.forget_node(node_id)
        self.grants.end(node_id)
        self._log(DirectoryEventKind.NODE_GONE, node_id)
        self._count_slots()

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
            if node.capacity_bytes != announcement.capacity_bytes:
                self.nodes_version += 1
            node.capacity_bytes, node.used_bytes = announcement.capacity_bytes, announcement.used_bytes
            node.ssd_capacity_bytes, node.ssd_used_bytes = announcement.ssd_capacity_bytes, announcement.ssd_used_bytes
            self._offer(node)
        changes: dict[str, bool] = {}  # key -> whether followers must now think that the node holds it
        self._take_out(announcement, changes)
        report_id, piece = announcement.report_id, announcement.piece
        if report_id and report_id != node.report_id:
            self._begin_report(node, report_id)
        is_broken = piece is not None and not self._continues(node, piece)
        accepted: list[bool] = []
        undecided: list[int] = []
        for index, entry in enumerate(announcement.added):
            stands = self._put_in(node.inventories[-1], announcement.node_id, entry, changes)
            accepted.append(stands is True)
            if stands is None:
                undecided.append(index)
        refused = self._take_piece(node, piece, changes) if piece is not None and not is_broken else []
        self._log_changes(announcement.node_id, changes)
        report_keys = self.grants.ask(announcement.node_id, now_s) if report_id and not node.reported else 0
        is_silent = not node.reported and not report_id
        return Announced(accepted, is_broken or is_silent, undecided, refused, report_keys)

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
        for removal in announcement.deleted:
            self._bury(removal, announcement.node_id)
        for removals in (announcement.removed, announcement.deleted):
            for removal in removals:
                self.pending_commits.settle(removal.key, announcement.node_id, removal.version)
                if self._table.remove(announcement.node_id, removal.key, removal.version):
                    changes[removal.key] = False

    def _bury(self, removal: Removal, node_id: str) -> None:
        """Take a removed chunk from its other holders too, and leave a tombstone, so that none brings it back."""
        key, version = removal.key, removal.version
        found = self._table.find(key)
        if found is not None and version in (None, found.version):
            version = found.version
            for other in found.node_ids:
                if other != node_id and self._table.remove(other, key, version):
                    self._log(DirectoryEventKind.REMOVED, other, (key,))
                    self._stale_holders.append(StaleHolder(other, key, version))
        if version is not None:
            self._tombstones[key] = version
            self._tombstones.move_to_end(key)
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def _put_in(self, inventory: InventoryId, node_id: str, entry: ChunkEntry, changes: dict[str, bool]) -> bool | None:
        """Enter a chunk; returns whether it stands. None: that is not known yet, the node is to ask again."""
        key, version, size_bytes, cold, unconfirmed = entry
        if unconfirmed and not self.rebuild.knows(key) and self._table.find(key) is None:
            return None  # an older chunk of the key may have yet to be reported
        self.pending_commits.settle(key, node_id, version)
        if self.pending_commits.is_for(key, node_id):
            return None  # of another put, which its client has committed and this node will adopt
        if self._is_buried(node_id, key, version, changes):
            return False
        outcome = self._table.add(inventory, key, version, size_bytes, cold=cold)
        if outcome in (Outcome.STORED, Outcome.REFUSED_LOST):
            changes[key] = outcome is Outcome.STORED
        stands = outcome in (Outcome.STORED, Outcome.KEPT)
        return None if not stands and key in self.pending_commits else stands

    def _is_buried(self, node_id: str, key: str, version: int, changes: dict[str, bool]) -> bool:
        if not self._tombstones or self._tombstones.get(key) != version:
            return False
        if self._table.remove(node_id, key, version):
            changes[key] = False
        return True

    # --- reports

    def _begin_report(self, node: NodeRecord, report_id: int) -> None:
        node.report_id, node.report_number, node.num_told_slots, node.reported = report_id, -1, 0, False
        node.inventories.append(self._table.open_inventory(node.instance.id))

    def _continues(self, node: NodeRecord, piece: ReportPiece) -> bool:
        """Whether ``piece`` is the next one of the node's report, or the last one again."""
        if not node.report_id or piece.number not in (node.report_number, node.report_number + 1):
            return False
        node.report_number = max(piece.number, 0)
        return True

    def _take_piece(self, node: NodeRecord, piece: ReportPiece, changes: dict[str, bool]) -> list[int]:
        """Enter a piece of a report; returns the indexes of its entries that do not stand."""
        node_id, entries = node.instance.id, piece.entries
        stands = [True] * len(entries)
        if len(self.pending_commits) or self._tombstones:
            for index, (key, version, _, _) in enumerate(entries):
                self.pending_commits.settle(key, node_id, version)
                stands[index] = not self._is_buried(node_id, key, version, changes)
        outcomes = self._table.add_report(node.inventories[-1], compress(entries, stands))
        if self.rebuild.is_ready or outcomes.count(Outcome.STORED) < len(entries):  # else there is nothing to tell
            for index, outcome in zip(compress(range(len(entries)), stands), outcomes, strict=True):
                if outcome is not Outcome.KEPT:
                    changes[entries[index][0]] = outcome is Outcome.STORED
                    stands[index] = outcome is Outcome.STORED
        node.num_told_slots = max(node.num_told_slots, min(piece.next_slot, NUM_SLOTS))
        if node.num_told_slots == NUM_SLOTS and not node.reported:
            self._end_report(node)
        self._count_slots()
        return [index for index, each in enumerate(stands) if not each]

    def _end_report(self, node: NodeRecord) -> None:
        # The node does not know of its pending commits yet, so they are in no report.
        for key, commit in self.pending_commits.of(node.instance.id):
            self._table.add(node.inventories[-1], key, commit.version, commit.size_bytes)
        for inventory in node.inventories[:-1]:
            self._table.kill_inventory(inventory, InventoryState.REPLACED)
        node.inventories, node.reported = node.inventories[-1:], True
        self.grants.end(node.instance.id)

    def _count_slots(self) -> None:
        was_ready = self.rebuild.is_ready
        self.rebuild.told((node_id, node.told_slots) for node_id, node in self._nodes.items())
        if self.rebuild.is_ready and not was_ready:
            self._log(DirectoryEventKind.RESET, "")  # the first event: a follower names the last one that it has

    # --- commits of clients

    def commit_by_client(self, said: ClientCommit, now_s: float) -> CommitResult:
        """Take a client's commit as the announcement of its node, until the node itself announces the chunk."""
        node = self._nodes.get(said.node_id)
        if node is None or node.instance.generation != said.generation or node.draining or self.pending_commits.full:
            return CommitResult.ASK_NODE
        key, version = said.key, said.version
        if not self.rebuild.knows(key) or self._tombstones.get(key) == version:
            return CommitResult.ASK_NODE
        found = self._table.find(key)
        if found is not None:
            return (
                CommitResult.ASK_NODE
                if said.node_id in found.node_ids or key in self.pending_commits
                else CommitResult.EXISTS
            )
        self._table.add(node.inventories[-1], key, version, said.size_bytes)
        self.pending_commits.make(key, said.node_id, version, said.size_bytes, now_s)
        self._log(DirectoryEventKind.STORED, said.node_id, (key,))
        return CommitResult.ACCEPTED

    def _take_back(self, key: str, node_id: str, version: int) -> None:
        """Remove a chunk whose pending commit the node has not confirmed, or has retracted."""
        found = self._table.find(key)
        if found is not None and found.version == version and self._table.remove(node_id, key, version):
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
        """For each key the chunk and its live holders. None is a "not found" unless ``is_incomplete``."""
        return list(map(self._table.find, keys))

    def holds(self, keys: Iterable[str]) -> bytes:
        """For each key 1 if a live node holds it, else 0. A 0 is a "not found" unless ``is_incomplete``."""
        return self._table.holds(keys)

    def is_incomplete(self, keys: Iterable[str], held: Iterable[object]) -> bool:
        """Whether one of ``keys`` that is not ``held`` may yet be reported."""
        if self.rebuild.is_ready:
            return False
        return any(not each and not self.rebuild.knows(key) for key, each in zip(keys, held, strict=True))

    def unreported(self) -> list[str]:
        """The registered nodes that have yet to tell some slots."""
        return [node_id for node_id, node in self._nodes.items() if node.told_slots < NUM_SLOTS]

    def place(self, request: PlacementRequest, rng: Random) -> list[NodeSummary]:
        """The nodes for a new chunk, best first (see placement)."""
        return [self._view(self._nodes[c.node_id]) for c in self._placement.place(request, rng)]

    def candidates(self) -> dict[str, PlacementCandidate]:
        """The nodes as placement sees them, by id; a view that changes with them."""
        return self._placement.candidates

    def instance(self, node_id: str) -> Instance | None:
        """The registration of ``node_id``; None if it is not registered."""
        node = self._nodes.get(node_id)
        return node.instance if node is not None else None

    def num_chunks(self, node_id: str) -> int:
        """Number of chunks that the node holds, as far as it has reported."""
        node = self._nodes.get(node_id)
        return sum(map(self._table.count, node.inventories)) if node is not None else 0

    def find(self, key: str) -> FoundChunk | None:
        """The chunk ``key`` and its live holders, as ``locate`` of one key."""
        return self._table.find(key)

    def list_keys(self, prefix: str, after: str, limit: int) -> KeyPage:
        """A page of the keys that begin with ``prefix`` (see key_pages), and whether there are more."""
        return key_pages.list_keys(self._table, prefix, after, limit)

    def walk(self) -> Iterator[str]:
        """All keys in no order, those of lost nodes included, to be taken in steps; each that stays comes once."""
        return self._table.walk()

    def snapshot(self, walk: Iterator[str], prefix: str, num_keys: int) -> tuple[dict[str, list[str]], bool]:
        """A page of a snapshot for followers, of the next keys of ``walk`` (see key_pages)."""
        return key_pages.snapshot(self._table, walk, prefix, num_keys)

    # --- time

    def tick(self, now_s: float) -> None:
        """Let times pass: of pending commits, and of the leases that a predecessor gave."""
        for key, commit in self.pending_commits.expired(now_s):
            self._take_back(key, commit.node_id, commit.version)
        self.rebuild.tick(now_s)
        self._count_slots()
        self._table.tick(now_s)

    def sweep(self, num_keys: int) -> bool:
        """Clean the next ``num_keys`` keys of lost nodes and replaced reports; returns whether there is more."""
        by_node: dict[str, dict[str, bool]] = {}
        for node_id, key in self._table.sweep(num_keys):
            by_node.setdefault(node_id, {})[key] = False
        for node_id, changes in by_node.items():
            self._log_changes(node_id, changes)
        return self._table.needs_sweep

    def _log_changes(self, node_id: str, changes: dict[str, bool]) -> None:
        if not self.rebuild.is_ready:
            return  # nobody follows yet: the first thing that a follower gets is a snapshot of all
        for kind, wanted in ((DirectoryEventKind.REMOVED, False), (DirectoryEventKind.STORED, True)):
            keys = tuple(key for key, held in changes.items() if held is wanted)
            if keys:
                self._log(kind, node_id, keys)

    def _log(self, kind: DirectoryEventKind, node_id: str, keys: tuple[str, ...] = ()) -> None:
        self.log.append(DirectoryEvent(self.log.last + 1, kind, node_id, keys), weight=1 + len(keys))

    def check(self) -> None:
        """Assert that all parts are sound, and that every inventory in use belongs to its node."""
        self._table.check()
        self.log.check()
        self.pending_commits.check()
        assert len(self._tombstones) <= MAX_TOMBSTONES
        self._placement.check()
        assert self.candidates().keys() == self._nodes.keys()
        for node_id, node in self._nodes.items():
            assert node.instance.id == node_id
            assert len(node.inventories) == 1 or (not node.reported and node.inventories)
            for inventory in node.inventories:
                assert self._table.owner(inventory) == node_id
        self.grants.check()

    def __repr__(self) -> str:
        return f"Directory({self.rebuild.state.name}, {len(self._nodes)} nodes, {len(self._table)} keys)"
