"""The directory of a master: the keys of all ranges, their holders, and the events for followers. Pure.

Keys are in ranges (see ``key_slots``), and each range has a ``Directory`` of its own: its table, its pending commits,
its tombstones, and its known slots. This module has the state of the whole master: the nodes with their inventories,
the grants to report, the order of all keys during listings, and the log of changes, numbered consecutively over all
ranges.

Example: A has reported the slots below 520 of 1,024. A client commits "kv/a" (slot 812, range 50) and is sent to the
node, as range 50 may have an older chunk of that key; its commit of "kv/k13" (slot 158, range 9) is accepted.

Rules of an announcement, which comes from a registered node and carries its generation (those of a key: ``directory``):
- a node that is not registered, or registered with another generation (a zombie), is refused;
- removed and deleted chunks are taken out first, then added ones are entered; the last announcement of a key counts;
- a report has a number, and comes slot by slot in numbered pieces. The first announcement with its number opens a new
  inventory, into which its pieces and all later announcements go, and when the last slot is reported, chunks only in
  older inventories are gone; until then nothing is forgotten. A piece may come twice. One that continues a report
  unknown to this directory proves nothing: the node is asked to begin again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from random import Random

from tanghulu.discovery.base import Instance
from tanghulu.store.master.directory.chunk_table import (
    PART_SHIFT,
    DirectoryTable,
    inventories_of,
    uncount,
)
from tanghulu.store.master.directory.directory import Directory, StaleHolder
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.inventories import Inventories, InventoryId, InventoryState
from tanghulu.store.master.directory.key_order import KeyOrder
from tanghulu.store.master.directory.nodes import NodeRecord, RegisteredNodes
from tanghulu.store.master.directory.placement import PlacementCandidate, PlacementRequest
from tanghulu.store.master.directory.rebuild import REBUILD_S, ClusterNodes, NodesInEtcd
from tanghulu.store.master.directory.report_grants import ReportGrants
from tanghulu.store.protocol.announcements import AnnounceReply, KnownRange, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.key_slots import ALL_BITS, NUM_RANGES, RANGE_SLOTS, bits_of, range_of, ranges_of
from tanghulu.store.protocol.messages import Location
from tanghulu.store.protocol.types import MAX_ANNOUNCED, ClientCommit, CommitResult

#: Keys and events kept by the log for followers: as many as there are keys, within these bounds. With more, to start
#: from a snapshot costs a follower no more. About 8 bytes each while the keys live, 150 when they are gone.
MIN_LOG_WEIGHT, MAX_LOG_WEIGHT = 1 << 16, 1 << 20


class RangeDirectories:
    """The map from keys to nodes; see the module. ``now_s`` is of one monotonic clock in all calls.

    ``cluster`` has the nodes if several masters share the ranges; then none of the ranges is owned at first.
    """

    def __init__(
        self,
        now_s: float,
        rebuild_s: float = REBUILD_S,
        cluster: NodesInEtcd | None = None,
    ) -> None:
        self.cluster = cluster or ClusterNodes(now_s, rebuild_s)
        self.grants = ReportGrants()
        self.log: EventRing[DirectoryEvent] = EventRing(MIN_LOG_WEIGHT)
        self.num_known_slots = 0  # slots whose unknown keys are missing keys
        self.num_retracted = 0
        self._nodes = RegisteredNodes()
        self._inventories = Inventories()
        self._order = KeyOrder()
        self._ranges = [Directory(number, self._inventories, self._order) for number in range(NUM_RANGES)]
        self._tables = [directory.table for directory in self._ranges]
        self._begun = [0] * NUM_RANGES  # number of arrivals of each at this master
        #: The ranges known here, or about to be.
        self.owned = frozenset(range(NUM_RANGES) if cluster is None else ())
        self._unready = [self._ranges[n] for n in sorted(self.owned)]  # those with unknown slots
        self._overdue: list[Directory] = []  # those with clients' commits awaiting confirmation by their nodes
        self._forgotten: list[dict[str, int]] = []  # parts of discarded tables, to be swept
        self._left_over: list[dict[str, list[InventoryId]]] = []  # by node, of discarded ranges; to be swept
        self._unswept: Iterator[tuple[DirectoryTable, str]] = iter(())
        self._stale_holders: list[StaleHolder] = []  # until the planner takes them, in the same call
        self._log(DirectoryEventKind.RESET, "")  # the first event: a follower names its last one

    def _of(self, key: str) -> Directory:
        return self._ranges[range_of(key)]

    @property
    def num_keys(self) -> int:
        """Number of keys; keys of a lost node count until they are swept."""
        return sum(map(len, self._tables))

    @property
    def num_nodes(self) -> int:
        """Number of registered nodes."""
        return len(self._nodes)

    @property
    def nodes_version(self) -> int:
        """Changes with the nodes, their own data, and their capacity."""
        return self._nodes.version

    @property
    def num_pending_commits(self) -> int:
        """Number of commits of clients that no node has confirmed yet."""
        return sum(len(directory.pending_commits) for directory in self._ranges)

    # --- nodes

    def node_registered(self, instance: Instance, now_s: float) -> None:
        """Enter a node, or its changed registration. Another generation of the same id starts empty.

        Unknown keys that the node may hold are not missing until it has reported them, or has left again.
        """
        node = self._nodes.get(instance.id)
        if node is not None and node.instance.generation == instance.generation:
            self._nodes.renew(node, instance, now_s)
            return
        self.node_gone(instance.id)
        self._nodes.enter(instance, now_s, self.owned)
        self._count_slots()

    def node_seen(self, node_id: str, now_s: float) -> None:
        """Record a sign of life of a node."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.last_seen_s = now_s

    def last_seen_s(self, node_id: str) -> float | None:
        """Return the time of the node's last announcement; None if it is not registered."""
        node = self._nodes.get(node_id)
        return None if node is None else node.last_seen_s

    def node_gone(self, node_id: str) -> None:
        """Forget a node whose lease ended: nobody finds its chunks from now on."""
        if not self._nodes.remove(node_id):
            return
        for by_node in self._left_over:
            by_node.pop(node_id, None)
        self._inventories.forget_owner(node_id)
        for directory in self._ranges:
            directory.pending_commits.forget_node(node_id)
        self.grants.end(node_id)
        self._log(DirectoryEventKind.NODE_GONE, node_id)
        self._count_slots()

    def nodes(self) -> list[NodeRecord]:
        """Return all registered nodes, by id."""
        return [self._nodes[node_id] for node_id in sorted(self._nodes)]

    # --- announcements of nodes

    def announce(self, announcement: NodeAnnouncement, now_s: float) -> AnnounceReply:
        """Take an announcement; return the answer as far as it concerns the directory.

        Raises LeaseExpired (register first) or InvalidRequest (a zombie's generation).
        """
        node = self._nodes.announced(announcement, now_s)
        node_id, report_id, piece = announcement.node_id, announcement.report_id, announcement.piece
        changes: dict[str, bool] = {}  # key -> whether followers must now believe that the node holds it
        self._take_out(announcement, changes)
        if report_id and report_id != node.report_id:
            self._begin_report(node, report_id, announcement.ranges)
        is_broken = piece is not None and not node.continues(piece)
        accepted: list[bool] = []
        undecided: list[int] = []
        numbers = ranges_of([entry.key for entry in announcement.added])
        for index, (number, entry) in enumerate(zip(numbers, announcement.added, strict=True)):
            stands = self._ranges[number].put_in(self._inventory(node, number), node_id, entry, changes)
            accepted.append(stands is True)
            if stands is None:
                undecided.append(index)
        refused = self._take_piece(node, piece, changes) if piece is not None and not is_broken else []
        self._log_changes(node_id, changes)
        self._take_back_unconfirmed(announcement)
        reporting = self._nodes.reporting(node)
        goes_on = bool(reporting) or piece is None  # a node that has reported all, and asks, has lost the last answer
        report_keys = self.grants.ask(node_id, now_s) if report_id and goes_on else 0
        unreported = [number for number in self._nodes.unreported(node, self.owned) if number not in reporting]
        is_silent = bool(unreported) and (not report_id or self._is_void(node, announcement.ranges))
        ranges = self._known_ranges(unreported) if unreported or self._unready else ()
        return AnnounceReply(accepted, undecided, refused, is_broken or is_silent, report_keys, ranges)

    def _take_back_unconfirmed(self, announcement: NodeAnnouncement) -> None:
        """Undo clients' overdue commits that the node has had time to name; see PendingCommits."""
        if len(announcement.added) >= MAX_ANNOUNCED:
            return  # there may be more
        node_id = announcement.node_id
        for directory in self._overdue:
            if announcement.reported_ranges >> directory.number & 1:
                for key in directory.take_back_overdue(node_id):
                    self._log(DirectoryEventKind.REMOVED, node_id, (key,))

    def _is_void(self, node: NodeRecord, numbers: frozenset[int] | None) -> bool:
        """Return whether the running report of these ranges contains nothing that counts, and so is never granted.

        It began before its ranges were this master's, or they have come back since.
        """
        covered = self.owned if numbers is None else self.owned & numbers
        return not self._nodes.reporting(node) and bool(self._nodes.unreported(node, covered))

    def _take_out(self, announcement: NodeAnnouncement, changes: dict[str, bool]) -> None:
        node_id = announcement.node_id
        for retraction in announcement.retracted:
            is_known = self._of(retraction.key).retract(retraction, node_id)
            self.num_retracted += is_known is not None
            if is_known:
                self._log(DirectoryEventKind.REMOVED, node_id, (retraction.key,))
        for removal in announcement.deleted:
            for stale in self._of(removal.key).bury(removal, node_id):
                self._log(DirectoryEventKind.REMOVED, stale.node_id, (stale.key,))
                self._stale_holders.append(stale)
        for removal in chain(announcement.removed, announcement.deleted):
            self._of(removal.key).take_out(removal, node_id, changes)

    # --- reports

    def _take_piece(self, node: NodeRecord, piece: ReportPiece, changes: dict[str, bool]) -> list[int]:
        """Enter a piece of a report; return the indexes of its rejected entries."""
        node_id, refused, start = node.instance.id, list[int](), 0
        for number, run in groupby(ranges_of([entry[0] for entry in piece.entries])):  # reported in order: few runs
            end = start + len(list(run))
            entries, inventory = piece.entries[start:end], self._inventory(node, number)
            refused += [start + i for i in self._ranges[number].take_report(inventory, node_id, entries, changes)]
            start = end
        for number in self._nodes.reported(node, piece.next_slot):
            self._ranges[number].end_report(self._inventory(node, number), node_id)
            for inventory in self._nodes.end_report(node_id, number):
                self._inventories.kill(inventory, InventoryState.REPLACED)
        if not self._nodes.reporting(node):
            self.grants.end(node_id)
        self._count_slots()
        return refused

    def _begin_report(self, node: NodeRecord, report_id: int, numbers: frozenset[int] | None) -> None:
        self._nodes.begin_report(node, report_id, self.owned if numbers is None else self.owned & numbers)
        node_id = node.instance.id
        for number in self._nodes.reporting(node):
            inventories = self._nodes.inventories(node_id, number)
            if inventories and self._inventories.counts[inventories[-1]]:
                self._nodes.opened(node_id, number, self._inventories.open(node_id))

    def _inventory(self, node: NodeRecord, number: int) -> InventoryId:
        """Return the current inventory of ``node`` in that range."""
        node_id = node.instance.id
        inventories = self._nodes.inventories(node_id, number)
        if not inventories:
            self._nodes.opened(node_id, number, self._inventories.open(node_id))
            inventories = self._nodes.inventories(node_id, number)
        return inventories[-1]

    # --- ranges that change hands

    def begin_range(self, number: int) -> None:
        """Own that range from now on: nothing of it is known until the nodes have reported it."""
        if number not in self.owned:
            self.owned |= {number}
            self._begun[number] += 1
        self._count_slots()

    def forget_range(self, number: int) -> None:
        """Stop owning that range; the memory of its keys and its nodes' inventories is freed in steps."""
        if number in self.owned:
            self._log(DirectoryEventKind.MOVED, "", ranges=1 << number)
        self.owned -= {number}
        self._forgotten += [part for part in self._ranges[number].forget() if part]
        self._left_over.append(self._nodes.forget_range(number))
        self._count_slots()

    def _sweep_forgotten(self, num_keys: int) -> None:
        """Free the next ``num_keys`` keys of lost ranges, or inventories without any keys left."""
        counts = self._inventories.counts
        for _ in range(num_keys):
            if self._forgotten:
                part = self._forgotten[-1]
                uncount(part.popitem()[1], counts)
                if not part:
                    self._forgotten.pop()
            elif not self._left_over:
                return
            elif self._left_over[-1]:
                for inventory in self._left_over[-1].popitem()[1]:
                    self._inventories.kill(inventory, InventoryState.GONE)
            else:
                self._left_over.pop()

    def _known_ranges(self, unreported: Sequence[int]) -> list[KnownRange]:
        """Return the known slots of the ranges that are not completely known, or that a node has yet to report."""
        known = {directory.number: directory.rebuild.num_known_slots for directory in self._unready}
        return [KnownRange(n, known.get(n, RANGE_SLOTS), n in unreported) for n in sorted({*known, *unreported})]

    @property
    def is_ready(self) -> bool:
        """Whether every unknown key is a missing key."""
        return bool(self.owned) and not self._unready

    @property
    def num_unready(self) -> int:
        """Number of owned ranges that are not completely known now."""
        return len(self._unready)

    @property
    def rebuilt_ranges(self) -> int:
        """The owned ranges that have been completely known since they arrived, a bit for each."""
        return bits_of(number for number in self.owned if self._ranges[number].rebuild.is_rebuilt)

    @property
    def is_rebuilt(self) -> bool:
        """Whether every owned range has been completely known since it arrived: so all nodes are known."""
        return bool(self.owned) and all(each.rebuild.is_rebuilt for each in self._unready)

    @property
    def num_begun(self) -> int:
        """Number of times that any range has come to this master."""
        return sum(self._begun)

    def times_begun(self, ranges: int = ALL_BITS) -> list[int]:
        """Return the number of arrivals of each of ``ranges``, a bit for each; knowledge dates from the last one."""
        return [times for number, times in enumerate(self._begun) if ranges >> number & 1]

    def _count_slots(self) -> None:
        """Count the slots reported by all nodes of the cluster."""
        are_all = self.cluster.are_all(self._nodes.ids)
        owned = [directory for directory in self._ranges if directory.number in self.owned]
        for directory in owned:
            directory.rebuild.update(self._nodes.least_reported(directory.number) if are_all else 0)
        self._unready = [directory for directory in owned if not directory.rebuild.is_ready]
        self.num_known_slots = sum(directory.rebuild.num_known_slots for directory in self._ranges)

    # --- commits of clients

    def commit_by_client(self, commit: ClientCommit, now_s: float) -> CommitResult:
        """Take a client's commit as the announcement of its node, until the node itself announces the chunk."""
        node = self._nodes.get(commit.node_id)
        if node is None or node.instance.generation != commit.generation or node.draining:
            return CommitResult.ASK_NODE
        number = range_of(commit.key)
        result = self._ranges[number].commit_by_client(commit, self._inventory(node, number), now_s)
        if result is CommitResult.ACCEPTED:
            self._log(DirectoryEventKind.STORED, commit.node_id, (commit.key,))
        return result

    @property
    def has_stale_holders(self) -> bool:
        """Whether nodes still hold chunks removed elsewhere."""
        return bool(self._stale_holders)

    def take_stale_holders(self) -> list[StaleHolder]:
        """Take the nodes that hold chunks removed elsewhere, each once."""
        taken, self._stale_holders = self._stale_holders, []
        return taken

    # --- questions of callers

    def find(self, key: str) -> Location | None:
        """Return the chunk ``key`` and its live holders, as ``locate`` of one key."""
        return self._tables[range_of(key)].find(key)

    def locate(self, keys: Sequence[str]) -> list[Location | None]:
        """Return for each key the chunk and its live holders. None means "not found" unless ``is_incomplete``."""
        tables = self._tables
        return [tables[number].find(key) for number, key in zip(ranges_of(keys), keys, strict=True)]

    def locate_to_remove(self, keys: Sequence[str]) -> list[Location | None]:
        """Do as ``locate``; from now on no other node becomes a holder of the versions found."""
        found = self.locate(keys)
        for key, chunk in zip(keys, found, strict=True):
            if chunk is not None:
                self._of(key).entomb(key, chunk.version)
        return found

    def is_entombed(self, key: str, version: int) -> bool:
        """Return whether no other node may become a holder of that version."""
        return self._of(key).is_entombed(key, version)

    def holds(self, keys: Sequence[str]) -> bytes:
        """Return for each key 1 if a live node holds it, else 0. A 0 means "not found" unless ``is_incomplete``."""
        tables, numbered = self._tables, zip(ranges_of(keys), keys, strict=True)
        if self._inventories.needs_sweep:
            return bytes([tables[number].holds(key) for number, key in numbered])
        parts = [table.parts for table in tables]
        return bytes([key in parts[number][hash(key) >> PART_SHIFT] for number, key in numbered])  # all that is known

    def is_incomplete(self, keys: Iterable[str], held: Iterable[object]) -> bool:
        """Return whether one of ``keys`` that is not ``held`` may yet be reported."""
        if self.is_ready:
            return False
        return any(not each and not self._of(key).rebuild.knows(key) for key, each in zip(keys, held, strict=True))

    def unreported(self) -> list[str]:
        """Return the registered nodes that have yet to report some slots."""
        return [node_id for node_id in self._nodes if self._nodes.unreported(self._nodes[node_id], self.owned)]

    def place(self, request: PlacementRequest, rng: Random) -> list[NodeRecord]:
        """Return the nodes for a new chunk, best first (see placement)."""
        return self._nodes.place(request, rng)

    def candidates(self) -> dict[str, PlacementCandidate]:
        """Return the nodes as used by placement, by id; a view that changes with them."""
        return self._nodes.candidates

    def instance(self, node_id: str) -> Instance | None:
        """Return the registration of ``node_id``; None if it is not registered."""
        node = self._nodes.get(node_id)
        return node.instance if node is not None else None

    def num_chunks(self, node_id: str, ranges: int = ALL_BITS) -> int:
        """Return the number of chunks of ``ranges``, a bit for each, held by the node according to its reports."""
        counts = self._inventories.counts
        return sum(counts[inventory] for inventory in self._nodes.all_inventories(node_id, ranges))

    # --- all keys

    def keys_from(self, first: str, *, inclusive: bool = True) -> Iterator[str] | None:
        """Return keys in order from ``first`` on, those of lost nodes included; valid until the next change.

        None: their order does not exist yet, and is one step nearer.
        """
        return self._order.keys_from(first, inclusive=inclusive) if self._order.extend() else None

    def walk(self, ranges: int = ALL_BITS) -> Iterator[str]:
        """Yield all keys of ``ranges``, a bit for each, to be taken in steps; each that stays comes once.

        They are unordered, and include those of lost nodes.
        """
        wanted = [table for number, table in enumerate(self._tables) if ranges >> number & 1]
        return chain.from_iterable(table.walk() for table in wanted)

    # --- time

    def tick(self, now_s: float) -> None:
        """Advance the time: of pending commits, of a predecessor's leases, and of an unused order.

        The log's size follows the current number of keys.
        """
        self._overdue.clear()
        for directory in self._ranges:
            if directory.pending_commits and directory.pending_commits.tick(now_s):
                self._overdue.append(directory)
        self.cluster.tick(now_s)
        self._count_slots()
        self._order.tick(now_s)
        self.log.max_weight = min(max(MIN_LOG_WEIGHT, self.num_keys), MAX_LOG_WEIGHT)

    def sweep(self, num_keys: int) -> bool:
        """Clean the next ``num_keys`` keys of lost nodes and replaced reports; return whether there is more."""
        inventories = self._inventories
        if self._forgotten or self._left_over:
            self._sweep_forgotten(num_keys)
            return True
        if not inventories.is_sweeping:
            if not inventories.begin_sweep():
                return False
            self._unswept = ((table, key) for table in self._tables for key in table.walk())
        part = list(islice(self._unswept, num_keys))
        by_node: dict[str, dict[str, bool]] = {}
        for table, key in part:
            for node_id in table.clean(key):
                by_node.setdefault(node_id, {})[key] = False
        for node_id, changes in by_node.items():
            self._log_changes(node_id, changes)
        if len(part) < num_keys:
            inventories.end_sweep()
        return inventories.needs_sweep

    def _log_changes(self, node_id: str, changes: dict[str, bool]) -> None:
        if self._unready:  # those have no followers yet: a follower's first event of a range is a snapshot
            changes = {key: held for key, held in changes.items() if self._of(key).rebuild.is_rebuilt}
        for kind, wanted in ((DirectoryEventKind.REMOVED, False), (DirectoryEventKind.STORED, True)):
            keys = tuple(key for key, held in changes.items() if held is wanted)
            if keys:
                self._log(kind, node_id, keys)

    def _log(self, kind: DirectoryEventKind, node_id: str, keys: tuple[str, ...] = (), ranges: int = 0) -> None:
        self.log.append(DirectoryEvent(self.log.last + 1, kind, node_id, keys, ranges), weight=1 + len(keys))

    def check(self) -> None:
        """Assert that all parts are sound, and that every inventory in use belongs to its node."""
        held = chain.from_iterable(directory.check() for directory in self._ranges)
        forgotten = chain.from_iterable(map(inventories_of, chain.from_iterable(map(dict.values, self._forgotten))))
        self._inventories.check(chain(held, forgotten))
        self._order.check()
        self.log.check()
        self._nodes.check(self.owned)
        for node_id in self._nodes:
            left_over = chain.from_iterable(by_node.get(node_id, ()) for by_node in self._left_over)
            inventories = [*self._nodes.all_inventories(node_id), *left_over]
            assert all(self._inventories.owners[inventory] == node_id for inventory in inventories)
            assert len(set(inventories)) == len(inventories)
        self.grants.check()
        owned = [directory for directory in self._ranges if directory.number in self.owned]
        assert self._unready == [directory for directory in owned if not directory.rebuild.is_ready]
        assert not any(len(directory.table) for directory in self._ranges if directory.number not in self.owned)
        assert self.num_known_slots == sum(directory.rebuild.num_known_slots for directory in self._ranges)

    def __repr__(self) -> str:
        num_ready = NUM_RANGES - len(self._unready)
        return f"RangeDirectories({num_ready} of {NUM_RANGES} ready, {len(self._nodes)} nodes, {self.num_keys} keys)"
