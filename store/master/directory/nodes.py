"""The registered nodes as the directory knows them: what they say of themselves, how far their reports are. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from tanghulu.discovery.base import Instance
from tanghulu.errors import InvalidRequest, LeaseExpired
from tanghulu.store.master.directory.announcement import NodeAnnouncement, ReportPiece
from tanghulu.store.master.directory.inventories import InventoryId
from tanghulu.store.master.directory.placement import PlacementCandidate, PlacementRequest, PlacementTable
from tanghulu.store.protocol.key_slots import NUM_SLOTS


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

    def begin_report(self, report_id: int, inventory: InventoryId) -> None:
        """Begin another report, into ``inventory``."""
        self.report_id, self.report_number, self.num_told_slots, self.reported = report_id, -1, 0, False
        self.inventories.append(inventory)

    def continues(self, piece: ReportPiece) -> bool:
        """Whether ``piece`` is the next one of the node's report, or the last one again."""
        if not self.report_id or piece.number not in (self.report_number, self.report_number + 1):
            return False
        self.report_number = max(piece.number, 0)
        return True

    def has_told(self, next_slot: int) -> bool:
        """Take note that the slots below ``next_slot`` were told; returns whether the report is over by that."""
        self.num_told_slots = max(self.num_told_slots, min(next_slot, NUM_SLOTS))
        return self.num_told_slots == NUM_SLOTS and not self.reported

    def end_report(self) -> list[InventoryId]:
        """End the report; returns the inventories that it replaces."""
        replaced = self.inventories[:-1]
        self.inventories, self.reported = self.inventories[-1:], True
        return replaced


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


class RegisteredNodes:
    """The records of all registered nodes, by id, and placement among them."""

    def __init__(self) -> None:
        self.version = 1  # changes with the nodes, what they say of themselves, and their capacity
        self._records: dict[str, NodeRecord] = {}
        self._placement = PlacementTable()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[str]:
        """The ids, in the order of registration."""
        return iter(self._records)

    def get(self, node_id: str) -> NodeRecord | None:
        """The record of ``node_id``; None if it is not registered."""
        return self._records.get(node_id)

    def __getitem__(self, node_id: str) -> NodeRecord:
        return self._records[node_id]

    def told_slots(self) -> dict[str, int]:
        """How many slots each node has told, from the first on."""
        return {node_id: node.told_slots for node_id, node in self._records.items()}

    @property
    def candidates(self) -> dict[str, PlacementCandidate]:
        """The nodes as placement sees them, by id; a view that changes with them."""
        return self._placement.candidates

    def place(self, request: PlacementRequest, rng: Random) -> list[NodeRecord]:
        """The nodes for a new chunk, best first (see placement)."""
        return [self._records[candidate.node_id] for candidate in self._placement.place(request, rng)]

    # --- changes

    def enter(self, instance: Instance, now_s: float, inventory: InventoryId) -> None:
        """Enter a node that is not registered; ``inventory`` is its own."""
        assert instance.id not in self._records
        node = self._records[instance.id] = NodeRecord(instance, now_s, [inventory])
        self.version += 1
        self._offer(node)

    def renew(self, node: NodeRecord, instance: Instance, now_s: float) -> None:
        """Take the registration of the same generation again, which may have changed."""
        if node.instance != instance:
            self.version += 1
        node.instance, node.last_seen_s = instance, now_s
        self._offer(node)

    def remove(self, node_id: str) -> bool:
        """Forget a node; returns whether it was registered."""
        if self._records.pop(node_id, None) is None:
            return False
        self.version += 1
        self._placement.remove(node_id)
        return True

    def heard(self, announcement: NodeAnnouncement, now_s: float) -> NodeRecord:
        """Take what a node announces of itself. Raises LeaseExpired (register first) or InvalidRequest (a zombie)."""
        node = self._records.get(announcement.node_id)
        if node is None:
            raise LeaseExpired(f"node {announcement.node_id} is not registered at this master; register, then announce")
        if node.instance.generation != announcement.generation:
            raise InvalidRequest(
                f"node {announcement.node_id} is registered with generation {node.instance.generation}, "
                f"not {announcement.generation}: another process took its place"
            )
        node.last_seen_s = now_s
        if announcement.capacity_bytes:
            if node.capacity_bytes != announcement.capacity_bytes:
                self.version += 1
            node.capacity_bytes, node.used_bytes = announcement.capacity_bytes, announcement.used_bytes
            node.ssd_capacity_bytes, node.ssd_used_bytes = announcement.ssd_capacity_bytes, announcement.ssd_used_bytes
            self._offer(node)
        return node

    def _offer(self, node: NodeRecord) -> None:
        """Let placement know how the node stands now."""
        instance = node.instance
        self._placement.set(
            PlacementCandidate(instance.id, instance.place, node.capacity_bytes, node.used_bytes, node.draining)
        )

    def check(self) -> None:
        """Assert that placement has the same nodes, and that each has one inventory, or several and a report."""
        self._placement.check()
        assert self.candidates.keys() == self._records.keys()
        for node_id, node in self._records.items():
            assert node.instance.id == node_id
            assert len(node.inventories) == 1 or (not node.reported and node.inventories)

    def __repr__(self) -> str:
        return f"RegisteredNodes({len(self._records)})"
