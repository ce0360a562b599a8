"""Key -> version, size and holders, for the many keys of a range. Pure data; knows nothing of leases, time or the wire.

Why it is small. A key with one holder costs its string, one dict entry and one int, which packs ``version (64 bits) |
size (44) | holder (21)``. A *holder* is the number of an inventory (see ``inventories``; 20 bits) and whether the chunk
is in its node's memory or, colder, on its SSD. Further holders of the key are above the version, 22 bits each, one more
than their number, so that 0 ends them.

These dicts contain strings and ints only, so the garbage collector never visits them.

Why it never stalls. A full dict is copied into a larger one in one step, so the keys of a range are in NUM_PARTS of
them, by the high bits of their hash (see ``parted_dict``; its methods are inlined here, where each costs as much as the
rest of a look-up). A lost node's entries are swept key by key.

To visit all keys, callers walk over them part by part, in steps; only listings need an order, which is made for them
(see ``key_order``).

Worked example: node A (inventory 0) and B (inventory 1) hold "k" at version 7, 4096 bytes: the entry of "k" is ``2 <<
129 | 7 << 65 | 4096 << 21 | 0``. A leaves: inventory 0 is GONE, ``find("k")`` returns B. After the sweep the entry is
``7 << 65 | 4096 << 21 | 1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from tanghulu.store.master.directory.inventories import INVENTORY_BITS, Inventories, InventoryId, InventoryState
from tanghulu.store.master.directory.key_order import KeyOrder
from tanghulu.store.protocol.messages import Location

#: Ten million keys of a range make 160,000 in each, which is copied within 10 ms.
NUM_PARTS = 64
#: ``hash(key) >> PART_SHIFT`` is a key's part, negative numbers from the end: the high bits of 64. Dicts use the low.
PART_SHIFT = 58
_SIZE_BITS = 44
_INVENTORY_MASK = (1 << INVENTORY_BITS) - 1
_COLD = 1 << INVENTORY_BITS
_HOLDER_BITS = INVENTORY_BITS + 1
_HOLDER_MASK = (1 << _HOLDER_BITS) - 1
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_VERSION_SHIFT = _HOLDER_BITS + _SIZE_BITS
_VERSION_MASK = (1 << 64) - 1
_MORE_SHIFT = _VERSION_SHIFT + 64
_MORE_BITS = _HOLDER_BITS + 1
#: A smaller entry has one holder.
_SEVERAL = 1 << _MORE_SHIFT


class Outcome(Enum):
    """The result of announcing a chunk."""

    STORED = "the node is a new holder"
    KEPT = "the node was known as a holder of this version"
    REFUSED = "another version of the key was first; the node drops its copy"
    REFUSED_LOST = "refused, and the node also lost the version it was known to hold"


class DirectoryTable:
    """Inventories by key. The inventories belong to all tables of a master, and so does the order of keys."""

    __slots__ = ("_counts", "_first_part", "_num_keys", "_order", "_owners", "_states", "parts")

    def __init__(self, inventories: Inventories, order: KeyOrder) -> None:
        #: The keys with their entries, by the high bits of the hash. Not to be changed from outside.
        self.parts: list[dict[str, int]] = [{} for _ in range(NUM_PARTS)]
        self._num_keys = 0
        self._order = order
        self._first_part = order.join(self.parts)
        self._states, self._owners, self._counts = inventories.states, inventories.owners, inventories.counts

    def __len__(self) -> int:
        """Number of keys, including those waiting for the sweep."""
        return self._num_keys

    # --- chunks

    def add(self, inventory: InventoryId, key: str, version: int, size_bytes: int, *, cold: bool = False) -> Outcome:
        """Record that ``inventory``'s node holds ``key`` at ``version``; the first live version wins.

        ``cold``: on its SSD, not in its memory.
        """
        assert 0 <= size_bytes <= _SIZE_MASK
        assert 0 <= version < 1 << 64
        holder = inventory | _COLD if cold else inventory
        part = self._part(key)
        entry = part.get(key)
        if entry is None and not self._order:  # as mostly
            part[key] = version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | holder
            self._counts[inventory] += 1
            self._num_keys += 1
            return Outcome.STORED
        if entry is None:
            self._rewrite(key, version, size_bytes, (), [holder])
            return Outcome.STORED
        old_version, old_size, holders = _unpacked(entry)
        if holder in holders and old_version == version:
            return Outcome.KEPT
        owner = self._owner(holder)
        # Traces of other nodes' REPLACED inventories stay, though dead: the sweep has yet to report them to followers.
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

    def remove(self, node_id: str, key: str, version: int) -> bool:
        """Record that ``node_id`` no longer holds ``key`` at ``version``.

        Returns whether a follower may believe that it does. Another version of the key stays.
        """
        entry = self._part(key).get(key)
        if entry is None:
            return False
        old_version, size_bytes, holders = _unpacked(entry)
        rest = [h for h in holders if self._owner(h) != node_id]
        if version != old_version or len(rest) == len(holders):
            return False
        is_reported = any(self._owner(h) == node_id and self._state(h) is not InventoryState.GONE for h in holders)
        self._rewrite(key, old_version, size_bytes, holders, rest)
        return is_reported

    def find(self, key: str) -> Location | None:
        """Return the chunk and its live holders; None if there are none."""
        entry = self.parts[hash(key) >> PART_SHIFT].get(key)
        if entry is None:
            return None
        states, owners, live = self._states, self._owners, InventoryState.LIVE
        if entry < _SEVERAL:
            inventory = entry & _INVENTORY_MASK
            if states[inventory] is not live:
                return None
            size_bytes, num_warm = (entry >> _HOLDER_BITS) & _SIZE_MASK, 0 if entry & _COLD else 1
            return Location(entry >> _VERSION_SHIFT, size_bytes, (owners[inventory],), num_warm)
        version, size_bytes, all_holders = _unpacked(entry)
        holders = [h for h in all_holders if states[h & _INVENTORY_MASK] is live]
        warm = [owners[h] for h in holders if not h & _COLD]
        node_ids = (*warm, *(owners[h & _INVENTORY_MASK] for h in holders if h & _COLD))
        return Location(version, size_bytes, node_ids, len(warm)) if node_ids else None

    def holds(self, key: str) -> bool:
        """Return whether a live node holds ``key``."""
        entry = self.parts[hash(key) >> PART_SHIFT].get(key)
        if entry is None:
            return False
        is_live = self._states[entry & _INVENTORY_MASK] is InventoryState.LIVE
        return is_live or (entry >= _SEVERAL and self.find(key) is not None)

    def is_in(self, inventory: InventoryId, key: str) -> bool:
        """Return whether ``inventory`` has a chunk of ``key``."""
        entry = self._part(key).get(key)
        return entry is not None and inventory in inventories_of(entry)

    def add_report(self, inventory: InventoryId, entries: Iterable[tuple[str, int, int, int]]) -> list[Outcome]:
        """``add`` many (key, version, size in bytes, whether it is cold), as fast as possible.

        Most keys of a report are new to a table that is rebuilt.
        """
        parts, order = self.parts, self._order
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

    def take_all(self) -> list[dict[str, int]]:
        """Restart without any key; return the former parts, whose entries count until ``uncount``."""
        before, self.parts = self.parts, [{} for _ in range(NUM_PARTS)]
        self._num_keys = 0
        self._order.replace(self._first_part, self.parts)
        return before

    def walk(self) -> Iterator[str]:
        """Yield all keys unordered, dead ones included, to be taken in steps; the table may change in between.

        A key that exists from beginning to end comes once.
        """
        for part in filter(None, self.parts):
            yield from list(part)

    def clean(self, key: str) -> Iterable[str]:
        """Remove dead inventories from the entry of ``key``; return the nodes to report to followers."""
        entry = self._part(key).get(key)
        if entry is None or (entry < _SEVERAL and self._states[entry & _INVENTORY_MASK] is InventoryState.LIVE):
            return ()
        version, size_bytes, holders = _unpacked(entry)
        live = [h for h in holders if self._state(h) is InventoryState.LIVE]
        owners = {self._owner(h) for h in holders if self._state(h) is InventoryState.REPLACED}
        if len(live) < len(holders):
            self._rewrite(key, version, size_bytes, holders, live)
        return owners

    # --- inside

    def _part(self, key: str) -> dict[str, int]:
        return self.parts[hash(key) >> PART_SHIFT]

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
        part = self.parts[number]
        if after:
            part[key] = _packed(version, size_bytes, after)
        else:
            del part[key]
            if not part:
                part.clear()  # an emptied dict keeps its table, a cleared one does not
        if bool(before) is not bool(after):
            self._num_keys += 1 if after else -1
            if self._order:
                (self._order.added if after else self._order.removed)(self._first_part + number % NUM_PARTS, key)

    def check(self) -> list[int]:
        """Assert that keys are in their parts and held once by a node; return the inventories that hold them."""
        assert self._num_keys == sum(map(len, self.parts))
        held: list[int] = []
        for part in filter(None, self.parts):
            for key, entry in part.items():
                assert self._part(key) is part
                held += self._checked_holders(key, _unpacked(entry)[2])
        return held

    def _checked_holders(self, key: str, holders: tuple[int, ...]) -> list[int]:
        inventories = [holder & _INVENTORY_MASK for holder in holders]
        assert len(set(inventories)) == len(inventories)
        owners = [self._owners[i] for i in inventories if self._states[i] is not InventoryState.GONE]
        assert len(set(owners)) == len(owners), f"{key!r} is held twice by one node"
        return inventories

    def __repr__(self) -> str:
        return f"DirectoryTable({self._num_keys} keys)"


def uncount(entry: int, counts: list[int]) -> None:
    """Subtract an entry of a discarded table from the inventories' ``counts``."""
    for holder in (entry,) if entry < _SEVERAL else _unpacked(entry)[2]:
        counts[holder & _INVENTORY_MASK] -= 1


def inventories_of(entry: int) -> list[int]:
    """Return the inventories named by an entry."""
    return [holder & _INVENTORY_MASK for holder in _unpacked(entry)[2]]


def _packed(version: int, size_bytes: int, holders: Sequence[int]) -> int:
    more = 0
    for holder in reversed(holders[1:]):
        more = more << _MORE_BITS | holder + 1
    return more << _MORE_SHIFT | version << _VERSION_SHIFT | size_bytes << _HOLDER_BITS | holders[0]


def _unpacked(entry: int) -> tuple[int, int, tuple[int, ...]]:
    """Return version, size in bytes and holders."""
    holders, more = [entry & _HOLDER_MASK], entry >> _MORE_SHIFT
    while more:
        holders.append((more & (1 << _MORE_BITS) - 1) - 1)
        more >>= _MORE_BITS
    return entry >> _VERSION_SHIFT & _VERSION_MASK, (entry >> _HOLDER_BITS) & _SIZE_MASK, tuple(holders)
