"""Holders as small numbers, so that a set of holders is an int, with the number of blocks held by each.

Owns the mapping holder <-> slot and the counts. A slot is free again when its holder holds nothing; the lowest free one
is assigned next, so that sets stay small ints while workers come and go. With workers a, b, c in slots 0, 1, 2 the set
{a, c} is 0b101; after b leaves, a new worker d gets slot 1.
"""

from __future__ import annotations

import heapq

from tanghulu.conductor.index.nodes import slots
from tanghulu.types import InstanceId

#: Sets whose names are cached; the cache is cleared when full.
MAX_NAMED_SETS = 4096


class HolderSlots:
    """Mapping holder <-> slot, and the number of blocks of each holder."""

    def __init__(self) -> None:
        self._slot_of: dict[InstanceId, int] = {}
        self._holder_at: list[InstanceId | None] = []
        self._num_blocks: list[int] = []
        self._free: list[int] = []
        self._names: dict[int, tuple[InstanceId, ...]] = {}

    @property
    def holders(self) -> list[InstanceId]:
        """All holders of at least one block."""
        return list(self._slot_of)

    def find(self, holder: InstanceId) -> int | None:
        """Return the slot of ``holder``; None if it holds nothing."""
        return self._slot_of.get(holder)

    def num_blocks(self, holder: InstanceId) -> int:
        """Return the number of blocks held by ``holder``."""
        slot = self._slot_of.get(holder)
        return 0 if slot is None else self._num_blocks[slot]

    def at(self, slot: int) -> InstanceId:
        """Return the holder in an occupied slot."""
        holder = self._holder_at[slot]
        assert holder is not None
        return holder

    def take(self, holder: InstanceId) -> int:
        """Return the slot of ``holder``, assigning one if needed: the caller must then `count` its first blocks."""
        slot = self._slot_of.get(holder)
        if slot is not None:
            return slot
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = len(self._holder_at)
            self._holder_at.append(None)
            self._num_blocks.append(0)
        self._slot_of[holder] = slot
        self._holder_at[slot] = holder
        return slot

    def count(self, slot: int, num_blocks: int) -> int:
        """Add ``num_blocks`` (may be negative) to the slot's count and return the sum. At 0 the holder is removed."""
        self._num_blocks[slot] += num_blocks
        if not self._num_blocks[slot]:
            del self._slot_of[self.at(slot)]
            self._holder_at[slot] = None
            heapq.heappush(self._free, slot)
            self._names.clear()
        return self._num_blocks[slot]

    def names(self, mask: int) -> tuple[InstanceId, ...]:
        known = self._names.get(mask)
        if known is None:
            if len(self._names) >= MAX_NAMED_SETS:
                self._names.clear()
            known = self._names[mask] = tuple(self.at(slot) for slot in slots(mask))
        return known

    def check(self, num_blocks: dict[int, int]) -> None:
        assert {slot: num for slot, num in enumerate(self._num_blocks) if num} == num_blocks
        assert {slot: h for h, slot in self._slot_of.items()} == {
            slot: h for slot, h in enumerate(self._holder_at) if h is not None
        }
        assert set(self._slot_of.values()) == set(num_blocks)
        assert set(self._free) == set(range(len(self._holder_at))) - set(num_blocks)
        assert len(self._names) <= MAX_NAMED_SETS
