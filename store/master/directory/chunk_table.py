"""Key -> version, size and holders, for many million keys. Pure data; knows nothing of leases, time or the wire.

Why it is small. A key with one holder costs its string, one dict entry, one int and eight bytes of the sorted index:
the int packs ``version (64 bits) | size (44) | holder (21)``. An *inventory* is a small number (20 bits) for what one
generation of a node has told in one report and since; a *holder* is an inventory and whether the chunk lies in its
memory or, colder, on its SSD. Further holders of a key stand in a second dict that holds replicated keys only.

Why it never stands still. Losing a node with a million chunks, or replacing what it said by a new report, marks
one inventory dead: O(1), and from then on no lookup sees it. Its traces are swept in slices, walking along the
sorted index, which is a cursor that insertions and removals do not disturb. An inventory's number is used again only
after a whole sweep that began after its death.

Why a sorted index is kept all the time (2 us a key, 8 bytes): listing is paged, and sorting a million keys for a page
would stop the master for a second; the sweep and the snapshots for followers need the same stable cursor.

Worked example: node A (inventory 0) and B (inventory 1) hold "k" at version 7, 4096 bytes: ``_entries["k"]`` is
``7 << 65 | 4096 << 21 | 0`` and ``_more["k"]`` is ``(1,)``. A goes: inventory 0 is GONE, ``find("k")`` says B. The
sweep comes by: the entry becomes ``7 << 65 | 4096 << 21 | 1`` and ``_more`` forgets "k".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import NamedTuple, NewType

from sortedcontainers import SortedList

from tanghulu.errors import Overloaded

InventoryId = NewType("InventoryId", int)

_INVENTORY_BITS = 20
_SIZE_BITS = 44
_INVENTORY_MASK = (1 << _INVENTORY_BITS) - 1
_COLD = 1 << _INVENTORY_BITS
_HOLDER_BITS = _INVENTORY_BITS + 1
_HOLDER_MASK = (1 << _HOLDER_BITS) - 1
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_VERSION_SHIFT = _HOLDER_BITS + _SIZE_BITS
MAX_INVENTORIES = 1 << _INVENTORY_BITS


class InventoryState(Enum):
    """The states of an inventory: LIVE -> REPLACED or GONE -> (swept) FREE -> LIVE of another node."""

    FREE = "nobody's"
    LIVE = "its node says that it holds these chunks"
    REPLACED = "a complete later report did not name what is left here; followers have not heard of it yet"
    GONE = "its node is gone; followers know"


class Outcome(Enum):
    """The result of announcing a chunk."""

    STORED = "the node is a new holder"
    KEPT = "the node was known as a holder of this version"
    REFUSED = "another version of the key was first; the node drops its copy"
    REFUSED_LOST = "refused, and the node also lost the version it was known to hold"


class FoundChunk(NamedTuple):
    """One key: its version, its size in bytes and the ids of the live nodes that hold it.

    The first ``num_warm`` of them have it in memory, the others on their SSD; of each the first holder first.
    """

    version: int
    size_bytes: int
    node_ids: tuple[str, ...]
    num_warm: int


class DirectoryTable:
    """Which inventories hold which key. Callers own the inventories: ``open_inventory`` ... ``kill_inventory``."""

    def __init__(self) -> None:
        self._entries: dict[str, int] = {}
        self._more: dict[str, tuple[int, ...]] = {}
        self._sorted: SortedList = SortedList()
        self._unsorted: list[str] = []  # new keys that the sorted index has yet to take in
        self._states: list[InventoryState] = []
        self._owners: list[str] = []
        self._counts: list[int] = []
        self._free: list[int] = []
        self._dying: set[int] = set()  # died since the sweep under way began
        self._sweeping: set[int] = set()  # free again when it ends
        self._cursor: str | None = None

    def __len__(self) -> int:
        """Number of keys, those that wait for the sweep included."""
        return len(self._entries)

    # --- inventory of nodes

    def open_inventory(self, node_id: str) -> InventoryId:
        """Open a LIVE inventory of ``node_id``; raises Overloaded beyond MAX_INVENTORIES."""
        if self._free:
            inventory = self._free.pop()
            self._states[inventory], self._owners[inventory] = InventoryState.LIVE, node_id
            return InventoryId(inventory)
        if len(self._states) >= MAX_INVENTORIES:
            raise Overloaded(f"more than {MAX_INVENTORIES} reports of nodes are in the directory")
        self._states.append(InventoryState.LIVE)
        self._owners.append(node_id)
        self._counts.append(0)
        return InventoryId(len(self._states) - 1)

    def kill_inventory(self, inventory: InventoryId, state: InventoryState) -> None:
        """Make ``inventory`` invisible to all lookups; an empty one is free at once. REPLACED may become GONE."""
        assert state in (InventoryState.REPLACED, InventoryState.GONE)
        assert self._states[inventory] in (InventoryState.LIVE, InventoryState.REPLACED)
        if not self._counts[inventory] and inventory not in self._dying | self._sweeping:
            self._states[inventory], self._owners[inventory] = InventoryState.FREE, ""
            self._free.append(inventory)
            return
        if self._states[inventory] is InventoryState.LIVE:
            self._dying.add(inventory)
        self._states[inventory] = state

    def forget_owner(self, node_id: str) -> None:
        """Kill all inventories of ``node_id`` as GONE."""
        for index, owner in enumerate(self._owners):
            if owner == node_id and self._states[index] in (InventoryState.LIVE, InventoryState.REPLACED):
                self.kill_inventory(InventoryId(index), InventoryState.GONE)

    def owner(self, inventory: InventoryId) -> str:
        """The node that ``inventory`` belongs to; "" if it is free."""
        return self._owners[inventory]

    def count(self, inventory: InventoryId) -> int:
        """Number of chunks in ``inventory``."""
        return self._counts[inventory]

    # --- chunks

    def add(self, inventory: InventoryId, key: str, version: int, size_bytes: int, *, cold: bool = False) -> Outcome:
        """Enter that ``inventory``'s node holds ``key`` at ``version``; the first version that lives wins.

        ``cold``: on its SSD, and not in its memory.
        """
        assert 0 <= size_bytes <= _SIZE_MASK
        assert 0 <= version < 1 << 64
        entry = self._entries.get(key)
        holder = inventory | _COLD if cold else inventory
        if entry is None:
            self._entries[key] = version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | holder
            self._unsorted.append(key)
            self._counts[inventory] += 1
            return Outcome.STORED
        if holder in self._holders(key, entry) and entry >> _VERSION_SHIFT == version:
            return Outcome.KEPT
        return self._join(holder, key, entry, version, size_bytes)

    def _join(self, holder: int, key: str, entry: int, version: int, size_bytes: int) -> Outcome:
        owner, holders = self._owner(holder), self._holders(key, entry)
        # Traces of other nodes' REPLACED inventories stay, dead as they are: the sweep has yet to tell the followers.
        others = [h for h in holders if self._owner(h) != owner and self._state(h) is not InventoryState.GONE]
        mine = any(self._state(h) is InventoryState.LIVE and self._owner(h) == owner for h in holders)
        old_version, old_size = entry >> _VERSION_SHIFT, (entry >> _HOLDER_BITS) & _SIZE_MASK
        if old_version == version:
            self._rewrite(key, version, old_size, holders, [*others, holder])
        elif any(self._state(h) is InventoryState.LIVE for h in others):
            if mine:
                self._rewrite(key, old_version, old_size, holders, others)
            return Outcome.REFUSED_LOST if mine else Outcome.REFUSED
        else:
            self._rewrite(key, version, size_bytes, holders, [*others, holder])
        return Outcome.KEPT if mine else Outcome.STORED

    def remove(self, node_id: str, key: str, version: int | None = None) -> bool:
        """Enter that ``node_id`` does not hold ``key`` at ``version`` (None: at all) any more.

        Returns whether a follower may believe that it does. Another version of the key stays.
        """
        entry = self._entries.get(key)
        if entry is None or version not in (None, entry >> _VERSION_SHIFT):
            return False
        holders = self._holders(key, entry)
        rest = [h for h in holders if self._owner(h) != node_id]
        if len(rest) == len(holders):
            return False
        told = any(self._owner(h) == node_id and self._state(h) is not InventoryState.GONE for h in holders)
        self._rewrite(key, entry >> _VERSION_SHIFT, (entry >> _HOLDER_BITS) & _SIZE_MASK, holders, rest)
        return told

    def find(self, key: str) -> FoundChunk | None:
        """The chunk and its live holders; None if there are none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        states, owners = self._states, self._owners
        inventory, live = entry & _INVENTORY_MASK, InventoryState.LIVE
        version, size_bytes = entry >> _VERSION_SHIFT, (entry >> _HOLDER_BITS) & _SIZE_MASK
        if key not in self._more:
            num_warm = 0 if entry & _COLD else 1
            return (
                FoundChunk(version, size_bytes, (owners[inventory],), num_warm) if states[inventory] is live else None
            )
        holders = [h for h in self._holders(key, entry) if states[h & _INVENTORY_MASK] is live]
        warm = [owners[h] for h in holders if not h & _COLD]
        node_ids = (*warm, *(owners[h & _INVENTORY_MASK] for h in holders if h & _COLD))
        return FoundChunk(version, size_bytes, node_ids, len(warm)) if node_ids else None

    def holds(self, keys: Iterable[str]) -> bytes:
        """For each key 1 if a live node holds it, else 0."""
        entries, more, states, live = self._entries.get, self._more, self._states, InventoryState.LIVE
        if not self.needs_sweep:  # whatever is known is held
            known = list(map(entries, keys))
            return bytes([entry is not None for entry in known]) if None in known else b"\1" * len(known)
        return bytes(
            [
                (entry := entries(key)) is not None
                and (states[entry & _INVENTORY_MASK] is live or (key in more and self.find(key) is not None))
                for key in keys
            ]
        )

    def add_report(self, inventory: InventoryId, entries: Iterable[tuple[str, int, int, int]]) -> list[Outcome]:
        """``add`` many (key, version, size in bytes, whether it is cold), as quickly as it can be done.

        Most keys of a report are new to a table that is rebuilt; the sorted index takes them in at once.
        """
        known, unsorted = self._entries, self._unsorted
        outcomes: list[Outcome] = []
        num_new = 0
        for key, version, size_bytes, cold in entries:
            if key in known:
                outcomes.append(self.add(inventory, key, version, size_bytes, cold=bool(cold)))
                continue
            holder = inventory | _COLD if cold else inventory
            known[key] = version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | holder
            unsorted.append(key)
            num_new += 1
            outcomes.append(Outcome.STORED)
        self._counts[inventory] += num_new
        self.settle()
        return outcomes

    def settle(self) -> None:
        """Take new keys into the sorted index: 2 us each, which no put has to wait for. Called at every tick."""
        if self._unsorted:
            self._sorted.update(sorted(self._unsorted))
            self._unsorted.clear()

    def keys_from(self, first: str, *, inclusive: bool = True) -> Iterator[str]:
        """Keys in order from ``first`` on, dead ones included; valid until the next change."""
        self.settle()
        return iter(self._sorted.irange(first, None, (inclusive, True)))

    # --- the sweep

    @property
    def needs_sweep(self) -> bool:
        """Whether dead inventories wait to be swept."""
        return bool(self._dying or self._sweeping)

    def sweep(self, num_keys: int) -> list[tuple[str, str]]:
        """Clean the next ``num_keys`` keys of dead inventories; returns the (node id, key) pairs to tell followers."""
        if not self._sweeping:
            self._sweeping, self._dying = self._dying, set()
            self._cursor = ""
        if not self._sweeping:
            return []
        assert self._cursor is not None
        keys = list(islice(self.keys_from(self._cursor, inclusive=self._cursor == ""), num_keys))
        removed = [(owner, key) for key in keys for owner in self._clean(key)]
        if len(keys) == num_keys:
            self._cursor = keys[-1]
            return removed
        for inventory in self._sweeping:
            assert self._counts[inventory] == 0
            self._states[inventory], self._owners[inventory] = InventoryState.FREE, ""
        self._free.extend(self._sweeping)
        self._sweeping, self._cursor = set(), None
        return removed

    def _clean(self, key: str) -> Iterable[str]:
        entry = self._entries[key]
        holders = self._holders(key, entry)
        dead = [h for h in holders if self._state(h) is not InventoryState.LIVE]
        if not dead:
            return ()
        live = [h for h in holders if self._state(h) is InventoryState.LIVE]
        told = {self._owner(h) for h in dead if self._state(h) is InventoryState.REPLACED}
        self._rewrite(key, entry >> _VERSION_SHIFT, (entry >> _HOLDER_BITS) & _SIZE_MASK, holders, live)
        return told

    # --- inside

    def _holders(self, key: str, entry: int) -> tuple[int, ...]:
        return (entry & _HOLDER_MASK, *self._more.get(key, ()))

    def _owner(self, holder: int) -> str:
        return self._owners[holder & _INVENTORY_MASK]

    def _state(self, holder: int) -> InventoryState:
        return self._states[holder & _INVENTORY_MASK]

    def _rewrite(self, key: str, version: int, size_bytes: int, before: tuple[int, ...], after: list[int]) -> None:
        for holder in before:
            self._counts[holder & _INVENTORY_MASK] -= 1
        for holder in after:
            self._counts[holder & _INVENTORY_MASK] += 1
        if not after:
            del self._entries[key]
            self.settle()
            self._sorted.remove(key)
            self._more.pop(key, None)
            if not self._entries:
                self._entries.clear()  # an emptied dict keeps its table, a cleared one does not
            return
        self._entries[key] = version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | after[0]
        if len(after) > 1:
            self._more[key] = tuple(after[1:])
        else:
            self._more.pop(key, None)

    def check(self) -> None:
        """Assert that index, entries and counts agree; no key is in a free inventory or held twice by one node."""
        self.settle()
        assert list(self._sorted) == sorted(self._entries)
        assert self._more.keys() <= self._entries.keys()
        counts = [0] * len(self._states)
        for key, entry in self._entries.items():
            inventories = [holder & _INVENTORY_MASK for holder in self._holders(key, entry)]
            assert len(set(inventories)) == len(inventories)
            owners = [self._owners[i] for i in inventories if self._states[i] is not InventoryState.GONE]
            assert len(set(owners)) == len(owners), f"{key!r} is held twice by one node"
            for inventory in inventories:
                assert self._states[inventory] is not InventoryState.FREE
                counts[inventory] += 1
        assert counts == self._counts
        assert sorted(self._free) == [i for i, state in enumerate(self._states) if state is InventoryState.FREE]
        dead = {i for i, s in enumerate(self._states) if s in (InventoryState.REPLACED, InventoryState.GONE)}
        assert dead == self._dying | self._sweeping

    def __repr__(self) -> str:
        return (
            f"DirectoryTable({len(self._entries)} keys, {len(self._more)} replicated, {len(self._states)} inventories)"
        )
