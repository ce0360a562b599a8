"""The registered nodes as known to the directory: their own data, and the progress of their reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from tanghulu.discovery.base import Instance
from tanghulu.errors import InvalidRequest, LeaseExpired
from tanghulu.store.master.directory.inventories import InventoryId
from tanghulu.store.master.directory.placement import PlacementCandidate, PlacementRequest, PlacementTable
from tanghulu.store.master.directory.rebuild import ReportedSlots
from tanghulu.store.protocol.announcements import NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.key_slots import ALL_BITS, NUM_RANGES, RANGE_SLOTS


@dataclass(slots=True)
class NodeRecord:
    """A registered node.

    ``report_id`` and ``report_number`` are of the last received piece of a report, -1: none. Its reported ranges are in
    ``RegisteredNodes``, by range.
    """

    instance: Instance
    last_seen_s: float
    capacity_bytes: int = 0
    used_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0
    report_id: int = 0
    report_number: int = -1
    begun: set[int] = field(default_factory=set)  # ranges of that report; those among them that are complete, too
    reported_all: frozenset[int] | None = None  # the very set of ranges last found to be completely reported

    @property
    def draining(self) -> bool:
        """Whether the node takes no new chunks, according to its registration."""
        return self.instance.attributes.get("draining") == "true"

    def continues(self, piece: ReportPiece) -> bool:
        """Return whether ``piece`` is the next one of the node's report, or a repetition of the last one."""
        if not self.report_id or piece.number not in (self.report_number, self.report_number + 1):
            return False
        self.report_number = max(piece.number, 0)
        return True


class RegisteredNodes:
    """The records of all registered nodes, by id, their reports of ranges, and placement among them.

    For each range that a node has begun to report, ``inventories`` has those that name its keys: the last is current,
    and a running report replaces those before it.
    """

    def __init__(self) -> None:
        self.version = 1  # changes with the nodes, their registrations and their capacity
        self._records: dict[str, NodeRecord] = {}
        self._placement = PlacementTable()
        self._slots = ReportedSlots()
        self._inventories: list[dict[str, list[InventoryId]]] = [{} for _ in range(NUM_RANGES)]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids, in the order of registration."""
        return iter(self._records)

    def get(self, node_id: str) -> NodeRecord | None:
        """Return the record of ``node_id``; None if it is not registered."""
        return self._records.get(node_id)

    def __getitem__(self, node_id: str) -> NodeRecord:
        return self._records[node_id]

    @property
    def ids(self) -> KeysView[str]:
        """The ids; a view that changes with them."""
        return self._records.keys()

    def least_reported(self, number: int) -> int:
        """Return the number of slots of that range reported by all nodes."""
        return self._slots.least(number)

    def reporting(self, node: NodeRecord) -> set[int]:
        """Return the incomplete ranges of the node's report."""
        begun = node.begun
        if begun:
            node_id = node.instance.id
            done = [(number, self._slots.reported(node_id, number)) for number in begun]
            begun.intersection_update(number for number, slots in done if slots not in (None, RANGE_SLOTS))
        return begun

    def unreported(self, node: NodeRecord, numbers: frozenset[int]) -> list[int]:
        """Return those of the ranges that the node has not reported to their ends.

        Called at every announcement, mostly with the same set; a set with a forgotten range is a different one.
        """
        if node.reported_all is numbers:
            return []
        unreported = self._slots.unreported(node.instance.id, numbers)
        node.reported_all = None if unreported else numbers
        return unreported

    def inventories(self, node_id: str, number: int) -> list[InventoryId]:
        """Return the inventories of the node in that range; none if it has reported nothing of it."""
        return self._inventories[number].get(node_id, [])

    def all_inventories(self, node_id: str, ranges: int = ALL_BITS) -> Iterator[InventoryId]:
        """Yield the inventories of the node in ``ranges``, a bit for each."""
        wanted = (by_node for number, by_node in enumerate(self._inventories) if ranges >> number & 1)
        return chain.from_iterable(by_node.get(node_id, ()) for by_node in wanted)

    @property
    def candidates(self) -> dict[str, PlacementCandidate]:
        """The nodes as used by placement, by id; a view that changes with them."""
        return self._placement.candidates

    def place(self, request: PlacementRequest, rng: Random) -> list[NodeRecord]:
        """Return the nodes for a new chunk, best first (see placement)."""
        return [self._records[candidate.node_id] for candidate in self._placement.place(request, rng)]

    # --- changes

    def enter(self, instance: Instance, now_s: float, numbers: Iterable[int]) -> None:
        """Enter an unregistered node; an empty one has thereby reported the ranges ``numbers``."""
        assert instance.id not in self._records
        node = self._records[instance.id] = NodeRecord(instance, now_s)
        self._slots.enter(instance.id, numbers if instance.holds_nothing else ())
        self.version += 1
        self._offer(node)

    def renew(self, node: NodeRecord, instance: Instance, now_s: float) -> None:
        """Take another registration of the same generation, which may have changed."""
        if node.instance != instance:
            self.version += 1
        node.instance, node.last_seen_s = instance, now_s
        self._offer(node)

    def remove(self, node_id: str) -> bool:
        """Forget a node; return whether it was registered."""
        node = self._records.pop(node_id, None)
        if node is None:
            return False
        self._slots.leave(node_id)
        for by_node in self._inventories:
            by_node.pop(node_id, None)
        self.version += 1
        self._placement.remove(node_id)
        return True

    def begin_report(self, node: NodeRecord, report_id: int, numbers: Iterable[int]) -> None:
        """Begin another report of ``node``, of these ranges."""
        node.report_id, node.report_number, node.begun, node.reported_all = report_id, -1, set(numbers), None
        for number in node.begun:
            self._slots.begin(node.instance.id, number)

    def reported(self, node: NodeRecord, next_slot: int) -> list[int]:
        """Record that ``node`` has reported the slots below ``next_slot`` of its report's ranges.

        Returns the ranges completed by that.
        """
        node_id, ended = node.instance.id, []
        for number in self.reporting(node):
            before = self._slots.reported(node_id, number) or 0
            num_slots = min(max(next_slot - number * RANGE_SLOTS, before), RANGE_SLOTS)
            self._slots.report(node_id, number, num_slots)
            if num_slots == RANGE_SLOTS:
                ended.append(number)
        return ended

    def opened(self, node_id: str, number: int, inventory: InventoryId) -> None:
        """Direct the node's chunks in that range to ``inventory`` from now on."""
        self._inventories[number].setdefault(node_id, []).append(inventory)

    def end_report(self, node_id: str, number: int) -> list[InventoryId]:
        """End the report of that range; return the inventories that it replaces."""
        inventories = self._inventories[number][node_id]
        replaced, inventories[:] = inventories[:-1], inventories[-1:]
        return replaced

    def forget_range(self, number: int) -> dict[str, list[InventoryId]]:
        """Discard all reports of that range; return the inventories that nodes had there."""
        self._slots.forget(number)
        before, self._inventories[number] = self._inventories[number], {}
        return before

    def announced(self, announcement: NodeAnnouncement, now_s: float) -> NodeRecord:
        """Take a node's announcement of itself. Raises LeaseExpired (register first) or InvalidRequest (a zombie)."""
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
        """Update the node's state in placement."""
        instance = node.instance
        self._placement.set(
            PlacementCandidate(instance.id, instance.place, node.capacity_bytes, node.used_bytes, node.draining)
        )

    def check(self, owned: frozenset[int]) -> None:
        """Assert that placement has the same nodes, and that each has one inventory per range, or more and a report.

        A node recorded as having reported all of ``owned``, the master's ranges, must have done so.
        """
        self._placement.check()
        assert self.candidates.keys() == self._records.keys()
        self._slots.check(self._records.keys())
        for node_id, node in self._records.items():
            assert node.instance.id == node_id
            assert node.reported_all is not owned or not self._slots.unreported(node_id, owned)
        for number, by_node in enumerate(self._inventories):
            for node_id, inventories in by_node.items():
                assert len(inventories) == 1 or (number in self.reporting(self._records[node_id]) and inventories)

    def __repr__(self) -> str:
        return f"RegisteredNodes({len(self._records)})"
