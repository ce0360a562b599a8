"""Key -> version, size and holders, for many million keys. Pure data; knows nothing of leases, time or the wire.

Why it is small. A key with one holder costs its string, one dict entry and one int, which packs ``version (64 bits) |
size (44) | holder (21)``. An *inventory* is a small number (20 bits) for what one generation of a node has told in one
report and since; a *holder* is an inventory and whether the chunk lies in its memory or, colder, on its SSD. Further
holders of the key stand above the version, 22 bits each, one more than their number, so that 0 ends them.

Strings and ints alone are in these dicts, so that the garbage collector never looks at them.

Why it never stands still. The keys lie in NUM_PARTS dicts, by their hash (see ``parted_dict``; its methods are written
out here, where each costs as much as the rest of a look-up). Losing a node with a million chunks, or replacing what it
said by a new report, marks one inventory dead: O(1), and from then on no lookup sees it. Its traces are swept in
slices, part by part. An inventory's number is used again only after a whole sweep that began after its death.

Whoever has to see all keys walks over them part by part, in steps; only listings need an order, which is made for them
(see ``key_order``).

Worked example: node A (inventory 0) and B (inventory 1) hold "k" at version 7, 4096 bytes: the entry of "k" is
``2 << 129 | 7 << 65 | 4096 << 21 | 0``. A goes: inventory 0 is GONE, ``find("k")`` says B. The sweep comes by: the
entry becomes ``7 << 65 | 4096 << 21 | 1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple, NewType

from tanghulu.errors import Overloaded
from tanghulu.parted_dict import NUM_PARTS, PART_SHIFT
from tanghulu.store.master.directory.key_order import KeyOrder

InventoryId = NewType("InventoryId", int)


_INVENTORY_BITS = 20
_SIZE_BITS = 44
_INVENTORY_MASK = (1 << _INVENTORY_BITS) - 1
_COLD = 1 << _INVENTORY_BITS
_HOLDER_BITS = _INVENTORY_BITS + 1
_HOLDER_MASK = (1 << _HOLDER_BITS) - 1
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_VERSION_SHIFT = _HOLDER_BITS + _SIZE_BITS
_VERSION_MASK = (1 << 64) - 1
_MORE_SHIFT = _VERSION_SHIFT + 64
_MORE_BITS = _HOLDER_BITS + 1
#: An entry that is less has one holder.
_SEVERAL = 1 << _MORE_SHIFT
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
        self._parts: list[dict[str, int]] = [{} for _ in range(NUM_PARTS)]
        self._num_keys = 0
        self._order = KeyOrder(self._parts)
        self._states: list[InventoryState] = []
        self._owners: list[str] = []
        self._counts: list[int] = []
        self._free: list[int] = []
        self._dying: set[int] = set()  # died since the sweep under way began
        self._sweeping: set[int] = set()  # free again when it ends
        self._unswept: Iterator[str] = iter(())

    def __len__(self) -> int:
        """Number of keys, those that wait for the sweep included."""
        return self._num_keys

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
        holder = inventory | _COLD if cold else inventory
        entry = self._part(key).get(key)
        if entry is None:
            self._rewrite(key, version, size_bytes, (), [holder])
            return Outcome.STORED
        old_version, old_size, holders = _unpacked(entry)
        if holder in holders and old_version == version:
            return Outcome.KEPT
        owner = self._owner(holder)
        # Traces of other nodes' REPLACED inventories stay, dead as they are: the sweep has yet to tell the followers.
        others = [h for h in holders if self._owner(h) != owner and self._state(h) is not InventoryState.GONE]
        mine = any(self._state(h) is InventoryState.LIVE and self._owner(h) == owner for h in holders)
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
        entry = self._part(key).get(key)
        if entry is None:
            return False
        old_version, size_bytes, holders = _unpacked(entry)
        rest = [h for h in holders if self._owner(h) != node_id]
        if version not in (None, old_version) or len(rest) == len(holders):
            return False
        told = any(self._owner(h) == node_id and self._state(h) is not InventoryState.GONE for h in holders)
        self._rewrite(key, old_version, size_bytes, holders, rest)
        return told

    def find(self, key: str) -> FoundChunk | None:
        """The chunk and its live holders; None if there are none."""
        entry = self._parts[hash(key) >> PART_SHIFT].get(key)
        if entry is None:
            return None
        states, owners, live = self._states, self._owners, InventoryState.LIVE
        if entry < _SEVERAL:
            inventory = entry & _INVENTORY_MASK
            if states[inventory] is not live:
                return None
            size_bytes, num_warm = (entry >> _HOLDER_BITS) & _SIZE_MASK, 0 if entry & _COLD else 1
            return FoundChunk(entry >> _VERSION_SHIFT, size_bytes, (owners[inventory],), num_warm)
        version, size_bytes, all_holders = _unpacked(entry)
        holders = [h for h in all_holders if states[h & _INVENTORY_MASK] is live]
        warm = [owners[h] for h in holders if not h & _COLD]
        node_ids = (*warm, *(owners[h & _INVENTORY_MASK] for h in holders if h & _COLD))
        return FoundChunk(version, size_bytes, node_ids, len(warm)) if node_ids else None

    def holds(self, keys: Iterable[str]) -> bytes:
        """For each key 1 if a live node holds it, else 0."""
        parts, states, live = self._parts, self._states, InventoryState.LIVE
        if not self.needs_sweep:  # whatever is known is held
            return bytes([key in parts[hash(key) >> PART_SHIFT] for key in keys])
        return bytes(
            [
                (entry := parts[hash(key) >> PART_SHIFT].get(key)) is not None
                and (states[entry & _INVENTORY_MASK] is live or (entry >= _SEVERAL and self.find(key) is not None))
                for key in keys
            ]
        )

    def add_report(self, inventory: InventoryId, entries: Iterable[tuple[str, int, int, int]]) -> list[Outcome]:
        """``add`` many (key, version, size in bytes, whether it is cold), as quickly as it can be done.

        Most keys of a report are new to a table that is rebuilt.
        """
        parts, order = self._parts, self._order
        outcomes: list[Outcome] = []
        num_new = 0
        for key, version, size_bytes, cold in entries:
            part = parts[hash(key) >> PART_SHIFT]
            if key in part or order:
                outcomes.append(self.add(inventory, key, version, size_bytes, cold=bool(cold)))
                continue
            holder = inventory | _COLD if cold else inventory
            part[key] = version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | holder
            num_new += 1
            outcomes.append(Outcome.STORED)
        self._counts[inventory] += num_new
        self._num_keys += num_new
        return outcomes

    # --- all keys

    def walk(self) -> Iterator[str]:
        """All keys in no order, dead ones included, to be taken in steps; the table may change in between.

        A key that is there from the beginning to the end comes once.
        """
        for part in self._parts:
            yield from list(part)

    def keys_from(self, first: str, *, inclusive: bool = True) -> Iterator[str] | None:
        """Keys in order from ``first`` on, dead ones included; valid until the next change.

        None: their order is not there yet, and has come a step nearer.
        """
        return self._order.keys_from(first, inclusive=inclusive) if self._order.extend() else None

    def tick(self, now_s: float) -> None:
        """Let go of an order that nobody asks for."""
        self._order.tick(now_s)

    # --- the sweep

    @property
    def needs_sweep(self) -> bool:
        """Whether dead inventories wait to be swept."""
        return bool(self._dying or self._sweeping)

    def sweep(self, num_keys: int) -> list[tuple[str, str]]:
        """Clean the next ``num_keys`` keys of dead inventories; returns the (node id, key) pairs to tell followers."""
        if not self._sweeping:
            self._sweeping, self._dying = self._dying, set()
            self._unswept = self.walk()
        if not self._sweeping:
            return []
        keys = list(islice(self._unswept, num_keys))
        removed = [(owner, key) for key in keys for owner in self._clean(key)]
        if len(keys) == num_keys:
            return removed
        for inventory in self._sweeping:
            assert self._counts[inventory] == 0
            self._states[inventory], self._owners[inventory] = InventoryState.FREE, ""
        self._free.extend(self._sweeping)
        self._sweeping = set()
        return removed

    def _clean(self, key: str) -> Iterable[str]:
        entry = self._part(key).get(key)
        if entry is None or (entry < _SEVERAL and self._states[entry & _INVENTORY_MASK] is InventoryState.LIVE):
            return ()
        version, size_bytes, holders = _unpacked(entry)
        live = [h for h in holders if self._state(h) is InventoryState.LIVE]
        told = {self._owner(h) for h in holders if self._state(h) is InventoryState.REPLACED}
        if len(live) < len(holders):
            self._rewrite(key, version, size_bytes, holders, live)
        return told

    # --- inside

    def _part(self, key: str) -> dict[str, int]:
        return self._parts[hash(key) >> PART_SHIFT]

    def _owner(self, holder: int) -> str:
        return self._owners[holder & _INVENTORY_MASK]

    def _state(self, holder: int) -> InventoryState:
        return self._states[holder & _INVENTORY_MASK]

    def _rewrite(self, key: str, version: int, size_bytes: int, before: tuple[int, ...], after: list[int]) -> None:
        for holder in before:
            self._counts[holder & _INVENTORY_MASK] -= 1
        for holder in after:
            self._counts[holder & _INVENTORY_MASK] += 1
        number = hash(key) >> PART_SHIFT
        part = self._parts[number]
        if after:
            part[key] = _packed(version, size_bytes, after)
        else:
            del part[key]
            if not part:
                part.clear()  # an emptied dict keeps its table, a cleared one does not
        if bool(before) is not bool(after):
            self._num_keys += 1 if after else -1
            if self._order:
                (self._order.added if after else self._order.removed)(number % NUM_PARTS, key)

    def check(self) -> None:
        """Assert that parts, order and counts agree; no key is in a free inventory or held twice by one node."""
        self._order.check()
        counts = [0] * len(self._states)
        for part in self._parts:
            for key, entry in part.items():
                assert self._part(key) is part
                self._check_holders(key, _unpacked(entry)[2], counts)
        assert self._num_keys == sum(map(len, self._parts))
        assert counts == self._counts
        assert sorted(self._free) == [i for i, state in enumerate(self._states) if state is InventoryState.FREE]
        dead = {i for i, s in enumerate(self._states) if s in (InventoryState.REPLACED, InventoryState.GONE)}
        assert dead == self._dying | self._sweeping

    def _check_holders(self, key: str, holders: tuple[int, ...], counts: list[int]) -> None:
        inventories = [holder & _INVENTORY_MASK for holder in holders]
        assert len(set(inventories)) == len(inventories)
        owners = [self._owners[i] for i in inventories if self._states[i] is not InventoryState.GONE]
        assert len(set(owners)) == len(owners), f"{key!r} is held twice by one node"
        for inventory in inventories:
            assert self._states[inventory] is not InventoryState.FREE
            counts[inventory] += 1

    def __repr__(self) -> str:
        return f"DirectoryTable({self._num_keys} keys, {len(self._states)} inventories, {self._order!r})"


def _packed(version: int, size_bytes: int, holders: Sequence[int]) -> int:
    more = 0
    for holder in reversed(holders[1:]):
        more = more << _MORE_BITS | holder + 1
    return more << _MORE_SHIFT | version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | holders[0]


def _unpacked(entry: int) -> tuple[int, int, tuple[int, ...]]:
    """Version, size in bytes and holders."""
    holders, more = [entry & _HOLDER_MASK], entry >> _MORE_SHIFT
    while more:
        holders.append((more & (1 << _MORE_BITS) - 1) - 1)
        more >>= _MORE_BITS
    return entry >> _VERSION_SHIFT & _VERSION_MASK, (entry >> _HOLDER_BITS) & _SIZE_MASK, tuple(holders)
