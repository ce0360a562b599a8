"""The inventories of nodes: chunks that one generation of a node has reported in one report and since. Pure data.

A table writes an inventory's number beside each key, and looks up here its node and whether it counts. So losing a node
with a million chunks, or replacing its chunks by a new report, marks one inventory dead: O(1), and from then on no
look-up sees it. Its traces are swept from the tables in slices. A number is reused only after a complete sweep that
began after its inventory's death.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NewType

from tanghulu.errors import Overloaded

InventoryId = NewType("InventoryId", int)

INVENTORY_BITS = 20
MAX_INVENTORIES = 1 << INVENTORY_BITS


class InventoryState(Enum):
    """The states of an inventory: LIVE -> REPLACED or GONE -> (swept) FREE -> LIVE of another node."""

    FREE = "nobody's"
    LIVE = "its node says that it holds these chunks"
    REPLACED = "a complete later report did not name what is left here; followers have not heard of it yet"
    GONE = "its node is gone; followers know"


class Inventories:
    """All inventories, by number. ``counts`` are the numbers of their chunks, maintained by the tables."""

    def __init__(self) -> None:
        self.states: list[InventoryState] = []
        self.owners: list[str] = []
        self.counts: list[int] = []
        self._free: list[int] = []
        self._dying: set[int] = set()  # died since the current sweep began
        self._sweeping: set[int] = set()  # free again when it ends

    def __len__(self) -> int:
        return len(self.states)

    def open(self, node_id: str) -> InventoryId:
        """Open a LIVE inventory of ``node_id``; raises Overloaded beyond MAX_INVENTORIES."""
        if self._free:
            inventory = self._free.pop()
            self.states[inventory], self.owners[inventory] = InventoryState.LIVE, node_id
            return InventoryId(inventory)
        if len(self.states) >= MAX_INVENTORIES:
            raise Overloaded(f"the directory already has {MAX_INVENTORIES} node reports, the maximum; try again")
        self.states.append(InventoryState.LIVE)
        self.owners.append(node_id)
        self.counts.append(0)
        return InventoryId(len(self.states) - 1)

    def kill(self, inventory: InventoryId, state: InventoryState) -> None:
        """Make ``inventory`` invisible to all look-ups; an empty one is free at once. REPLACED may become GONE."""
        assert state in (InventoryState.REPLACED, InventoryState.GONE)
        assert self.states[inventory] in (InventoryState.LIVE, InventoryState.REPLACED)
        if not self.counts[inventory] and inventory not in self._dying and inventory not in self._sweeping:
            self.states[inventory], self.owners[inventory] = InventoryState.FREE, ""
            self._free.append(inventory)
            return
        if self.states[inventory] is InventoryState.LIVE:
            self._dying.add(inventory)
        self.states[inventory] = state

    def forget_owner(self, node_id: str) -> None:
        """Kill all inventories of ``node_id`` as GONE."""
        for index, owner in enumerate(self.owners):
            if owner == node_id and self.states[index] in (InventoryState.LIVE, InventoryState.REPLACED):
                self.kill(InventoryId(index), InventoryState.GONE)

    # --- the sweep

    @property
    def needs_sweep(self) -> bool:
        """Whether dead inventories wait to be swept."""
        return bool(self._dying or self._sweeping)

    @property
    def is_sweeping(self) -> bool:
        """Whether a sweep is in progress."""
        return bool(self._sweeping)

    def begin_sweep(self) -> bool:
        """Have all dead inventories swept; False if there are none."""
        assert not self._sweeping, "a sweep is under way"
        self._sweeping, self._dying = self._dying, set()
        return bool(self._sweeping)

    def end_sweep(self) -> None:
        """Record that every key of every table has been visited since ``begin_sweep``."""
        for inventory in self._sweeping:
            assert self.counts[inventory] == 0
            self.states[inventory], self.owners[inventory] = InventoryState.FREE, ""
        self._free.extend(self._sweeping)
        self._sweeping = set()

    def check(self, held: Iterable[int]) -> None:
        """Assert that states and counts are sound; ``held`` are the numbers in the tables."""
        counts = [0] * len(self.states)
        for inventory in held:
            assert self.states[inventory] is not InventoryState.FREE
            counts[inventory] += 1
        assert counts == self.counts
        assert sorted(self._free) == [i for i, state in enumerate(self.states) if state is InventoryState.FREE]
        dead = {i for i, s in enumerate(self.states) if s in (InventoryState.REPLACED, InventoryState.GONE)}
        assert dead == self._dying | self._sweeping

    def __repr__(self) -> str:
        return f"Inventories({len(self.states)}, {len(self._dying | self._sweeping)} of them dead)"
