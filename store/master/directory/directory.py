"""The directory of one range of keys: the holders announced by nodes. Pure: events in, data out.

The node is the truth about its chunks; this is its mirror, rebuilt from reports when the master is new. Owns the
range's chunk table, its pending commits, its tombstones, and the number of its known slots. The set of nodes, each
node's inventories and the events for followers belong to ``ranges``. Has no lease, socket or clock.

Rules for a registered node's announcements about a key:
- of concurrent puts of a key the first announced version wins while a live node holds it; others get accepted=False
  and drop their copy; the same version on another node is a replica;
- of two versions the older one stays: a put not confirmed by any master is undecided (the node asks again) while its
  key may have a chunk that has yet to be reported; chunks confirmed by a predecessor count at once;
- a removal names the version: a repeated one does not touch later puts;
- a deleted version leaves a tombstone, and so does one that a client is about to remove: a node that was cut off and
  comes back with it, or has copied it meanwhile, gets accepted=False;
- a client's commit (see pending_commits) counts as announced until its node announces it; others ask again until then.
  The node retracts that version only, and only while its commit is pending.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from tanghulu.store.master.directory.chunk_table import DirectoryTable, Outcome
from tanghulu.store.master.directory.inventories import Inventories, InventoryId
from tanghulu.store.master.directory.key_order import KeyOrder
from tanghulu.store.master.directory.pending_commits import PendingCommits
from tanghulu.store.master.directory.rebuild import Rebuild
from tanghulu.store.protocol.announcements import ChunkEntry, Removal
from tanghulu.store.protocol.key_slots import range_of
from tanghulu.store.protocol.types import ClientCommit, CommitResult

#: Tombstones of a range; beyond it the oldest is dropped.
MAX_TOMBSTONES = 1 << 10


class StaleHolder(NamedTuple):
    """A node that still holds a chunk removed at another node."""

    node_id: str
    key: str
    version: int


class Directory:
    """The keys of the range ``number``; see the module. ``changes`` collects, for one node's announcement, whether
    followers must now believe that the node holds each key.
    """

    __slots__ = ("_tombstones", "number", "pending_commits", "rebuild", "table")

    def __init__(self, number: int, inventories: Inventories, order: KeyOrder) -> None:
        self.number = number
        self.rebuild = Rebuild(number)
        self.table = DirectoryTable(inventories, order)
        self.pending_commits = PendingCommits()
        self._tombstones: OrderedDict[tuple[str, int], None] = OrderedDict()  # keys and versions

    def forget(self) -> list[dict[str, int]]:
        """Restart empty; return the parts of the table, which are to be swept."""
        self.rebuild, self.pending_commits, self._tombstones = Rebuild(self.number), PendingCommits(), OrderedDict()
        return self.table.take_all()

    # --- announcements of nodes

    def put_in(self, inventory: InventoryId, node_id: str, entry: ChunkEntry, changes: dict[str, bool]) -> bool | None:
        """Enter a chunk; return whether it is accepted. None: not known yet, the node is to ask again."""
        key, version, size_bytes, cold, unconfirmed = entry
        if unconfirmed and not self.rebuild.knows(key) and self.table.find(key) is None:
            return None  # an older chunk of the key may have yet to be reported
        if self.pending_commits.announced(key, node_id, version):
            return None  # its client has committed another put, which this node will adopt
        if self._tombstones and self._is_buried(node_id, key, version):
            return False
        outcome = self.table.add(inventory, key, version, size_bytes, cold=cold)
        if outcome in (Outcome.STORED, Outcome.REFUSED_LOST):
            changes[key] = outcome is Outcome.STORED
        stands = outcome in (Outcome.STORED, Outcome.KEPT)
        return None if not stands and key in self.pending_commits else stands

    def take_out(self, removal: Removal, node_id: str, changes: dict[str, bool]) -> None:
        """Record that the node no longer holds a chunk."""
        self.pending_commits.settle(removal.key, node_id, removal.version)
        if self.table.remove(node_id, removal.key, removal.version):
            changes[removal.key] = False

    def bury(self, removal: Removal, node_id: str) -> list[StaleHolder]:
        """Remove a chunk from its other holders too, and leave a tombstone, so that none restores it.

        Returns those other holders.
        """
        key, version = removal.key, removal.version
        stale: list[StaleHolder] = []
        found = self.table.find(key)
        if found is not None and found.version == version:
            for other in found.node_ids:
                if other != node_id and self.table.remove(other, key, version):
                    stale.append(StaleHolder(other, key, version))
        self.entomb(key, version)
        return stale

    def entomb(self, key: str, version: int) -> None:
        """Leave a tombstone of ``version``: its known holders may keep it, but no other node can become one."""
        self._tombstones[key, version] = None
        self._tombstones.move_to_end((key, version))
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def is_entombed(self, key: str, version: int) -> bool:
        """Return whether a tombstone keeps that version from further nodes."""
        return (key, version) in self._tombstones

    def _is_buried(self, node_id: str, key: str, version: int) -> bool:
        if not self.is_entombed(key, version):
            return False
        found = self.table.find(key)
        return found is None or found.version != version or node_id not in found.node_ids

    # --- reports

    def take_report(
        self,
        inventory: InventoryId,
        node_id: str,
        entries: Sequence[tuple[str, int, int, int]],
        changes: dict[str, bool],
    ) -> list[int]:
        """Enter a part of a report: (key, version, size in bytes, is it cold) of confirmed chunks.

        Returns the indexes of the rejected ones.
        """
        stands = [True] * len(entries)
        if len(self.pending_commits) or self._tombstones:
            for index, (key, version, _, _) in enumerate(entries):
                self.pending_commits.settle(key, node_id, version)
                stands[index] = not self._is_buried(node_id, key, version)
        outcomes = self.table.add_report(inventory, compress(entries, stands))
        if not self.rebuild.is_rebuilt and outcomes.count(Outcome.STORED) == len(entries):
            return []  # and nothing to report: there are no followers yet
        for index, outcome in zip(compress(range(len(entries)), stands), outcomes, strict=True):
            if outcome is not Outcome.KEPT:
                changes[entries[index][0]] = outcome is Outcome.STORED
                stands[index] = outcome is Outcome.STORED
        return [index for index, each in enumerate(stands) if not each]

    def end_report(self, inventory: InventoryId, node_id: str) -> None:
        """Take over chunks missing from the node's report: the node does not know its pending commits yet.

        If the report names another chunk of the key, the node had that before, and it stays.
        """
        for key, commit in self.pending_commits.of(node_id):
            if not self.table.is_in(inventory, key):
                self.table.add(inventory, key, commit.version, commit.size_bytes)

    # --- commits of clients

    def commit_by_client(self, commit: ClientCommit, inventory: InventoryId, now_s: float) -> CommitResult:
        """Take a client's commit as the announcement of its node, until the node itself announces the chunk."""
        key, version, pending = commit.key, commit.version, self.pending_commits
        if pending.full or not self.rebuild.knows(key) or (key, version) in self._tombstones:
            return CommitResult.ASK_NODE
        found = self.table.find(key)
        if found is not None:
            is_the_nodes = commit.node_id in found.node_ids or key in pending
            return CommitResult.ASK_NODE if is_the_nodes else CommitResult.EXISTS
        self.table.add(inventory, key, version, commit.size_bytes)
        pending.make(key, commit.node_id, version, commit.size_bytes, now_s)
        return CommitResult.ACCEPTED

    def retract(self, retraction: Removal, node_id: str) -> bool | None:
        """Undo the commit of a put that failed at its node; return whether followers have received the chunk.

        None: there is no such commit.
        """
        key, version = retraction
        if not self.pending_commits.settle(key, node_id, version):
            return None
        return self._take_back(key, node_id, version)

    def take_back_overdue(self, node_id: str) -> list[str]:
        """Undo the node's overdue unconfirmed commits, as it has named all its chunks.

        Returns the keys of chunks that followers have received.
        """
        unconfirmed = self.pending_commits.take_overdue(node_id)
        return [key for key, commit in unconfirmed if self._take_back(key, node_id, commit.version)]

    def _take_back(self, key: str, node_id: str, version: int) -> bool:
        """Remove a chunk whose pending commit the node has not confirmed, or has retracted."""
        found = self.table.find(key)
        return found is not None and found.version == version and self.table.remove(node_id, key, version)

    def check(self) -> list[int]:
        """Assert that the parts are sound, and that no key is of another range; return the holding inventories."""
        self.pending_commits.check()
        assert len(self._tombstones) <= MAX_TOMBSTONES
        assert all(range_of(key) == self.number for key in self.table.walk())
        return self.table.check()

    def __repr__(self) -> str:
        return f"Directory({self.number}, {self.rebuild!r}, {len(self.table)} keys)"
