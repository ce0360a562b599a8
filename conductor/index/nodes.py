"""A node of the prefix index: a stretch of blocks, and for each holder a bitmap of the blocks it has.

Owns the blocks' order, the *proven* part of that order, and the bitmaps. Independent of the hash table and events. To a
node a holder is a slot number (`HolderSlots`), and a set of holders an int with the bits of their slots.

Bit p of a bitmap stands for ``blocks[p]``. Holders of the whole node are bits of ``full`` alone; the others have a
bitmap in ``partial``. A node of 5 blocks, of which slot 0 holds all and slot 3 all but ``blocks[2]``, has

    full = 0b0001, partial = {3: 0b11011}

Slot 3's leading run is the number of trailing ones, 2. Nodes are cut and joined by shifting such ints.

The first ``chained`` blocks are known to follow each other on one chain, since a prompt was compared with them. Blocks
after them are in the order in which they were reported, which may mean nothing.

``answer`` belongs to the index: the leading run of each holder by name; None once blocks or a bitmap have changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tanghulu.types import BlockHash, InstanceId

#: Up to this many blocks are compared one by one even in a proven order: it costs no more than a bisection.
COMPARED_BLOCKS = 32
#: Sets of holders whose names are cached; the cache is cleared when full.
MAX_NAMED_SETS = 4096


def slots(holders: int) -> Iterator[int]:
    """Yield the slots whose bits are set, lowest first: 0b1001 gives 0, 3."""
    while holders:
        lowest = holders & -holders
        yield lowest.bit_length() - 1
        holders ^= lowest


def leading_ones(bits: int) -> int:
    """Return the number of leading held blocks, the trailing ones of ``bits``: 3 for 0b10111."""
    return (bits ^ (bits + 1)).bit_length() - 1


def ranges(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of ones as (start, stop), highest first: 0b110011 gives (4, 6), (0, 2)."""
    while bits:
        stop = bits.bit_length()
        start = (((1 << stop) - 1) & ~bits).bit_length()
        yield start, stop
        bits &= (1 << start) - 1


class IndexNode:
    """A stretch of blocks in order, with their holders. Each holder holds at least one, and each block has a holder."""

    __slots__ = ("_runs", "answer", "blocks", "chained", "full", "partial", "touched")

    def __init__(self, blocks: list[BlockHash], full: int, chained: int = 1) -> None:
        self.blocks = blocks
        self.chained = chained
        self.full = full
        self.partial: dict[int, int] = {}
        self.touched = False
        self.answer: dict[InstanceId, int] | None = None
        self._runs: list[tuple[int, int, int]] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Node {len(self)} blocks, {self.chained} proven, full {self.full:#b}, {len(self.partial)} partial>"

    @property
    def all_bits(self) -> int:
        return (1 << len(self.blocks)) - 1

    @property
    def holders(self) -> int:
        """All holders of at least one block."""
        mask = self.full
        for slot in self.partial:
            mask |= 1 << slot
        return mask

    def bits(self, slot: int) -> int:
        return self.all_bits if self.full >> slot & 1 else self.partial.get(slot, 0)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Slot, bit and leading run of each holder with a bitmap; cached until a bitmap changes."""
        if self._runs is None:
            self._runs = [(slot, 1 << slot, leading_ones(bits)) for slot, bits in self.partial.items()]
        return self._runs

    def leads(self, chain: list[BlockHash]) -> bool:
        """Return whether ``chain`` certainly begins with all blocks of the node. ``chain[0]`` is one of them."""
        num = len(self.blocks)
        return self.chained == num <= len(chain) and chain[num - 1] == self.blocks[-1]

    def ends_backwards(self, blocks: list[BlockHash]) -> bool:
        """Return whether every holder has the whole node, and the node ends with ``blocks`` in reverse order."""
        return not self.partial and self.blocks[: -len(blocks) - 1 : -1] == blocks

    def shorten(self, num_blocks: int) -> list[BlockHash]:
        """Remove the last ``num_blocks`` (not all) from a node held whole by every holder; return them."""
        gone = self.blocks[-num_blocks:]
        del self.blocks[-num_blocks:]
        self.chained = min(self.chained, len(self.blocks))
        self._changed()
        return gone

    def num_partial_if(self, behind: IndexNode) -> int:
        """Return the number of holders that would have a bitmap if ``behind`` were joined."""
        return ((self.holders | behind.holders) & ~(self.full & behind.full)).bit_count()

    def ahead(self, blocks: list[BlockHash]) -> tuple[int, int]:
        """Return (place, number) of a leading part of ``blocks`` reaching its end or the node's; else (0, 0)."""
        own = self.blocks
        first = 0 if blocks[0] == own[0] else own.index(blocks[0])
        num = min(len(blocks), len(own) - first)
        return (first, num) if own[first : first + num] == blocks[:num] else (0, 0)

    def stretch(self, blocks: list[BlockHash], held: int = 0) -> int:
        """Return the bitmap of ``blocks`` if they are a stretch, forwards or backwards (evicted from the tail); else 0.

        ``blocks[0]`` is in the node. ``held``: the bitmap of the reporting holder; eviction from the tail begins with
        the last block held, which saves the search.
        """
        own, num = self.blocks, len(blocks)
        first = held.bit_length() - 1
        if first < 0 or own[first] != blocks[0]:
            first = len(own) - 1 if blocks[0] == own[-1] else own.index(blocks[0])
        last = first - num + 1
        if last >= 0 and own[last] == blocks[-1] and own[last : first + 1] == blocks[::-1]:
            return ((1 << num) - 1) << last
        return ((1 << num) - 1) << first if own[first : first + num] == blocks else 0

    def positions(self, blocks: list[BlockHash]) -> int:
        """Return the bitmap of ``blocks``, all of which are in the node, in any order."""
        place_of = {block: place for place, block in enumerate(self.blocks)}
        bits = 0
        for place in map(place_of.__getitem__, blocks):
            bits |= 1 << place
        return bits

    def hold(self, slot: int, bits: int) -> int:
        """Add ``bits`` to the blocks of ``slot``; return how many of them are new."""
        before = self.bits(slot)
        self._set(slot, before | bits)
        return (bits & ~before).bit_count()

    def release(self, slot: int, bits: int) -> tuple[int, int]:
        """Remove ``bits`` from ``slot``; return how many it had, and the bitmap of blocks left without a holder."""
        before = self.bits(slot)
        lost = before & bits
        if not lost:
            return 0, 0
        self.full &= ~(1 << slot)
        self._set(slot, before & ~bits)
        orphans = 0 if self.full else lost
        for others in self.partial.values():
            orphans &= ~others
        return lost.bit_count(), orphans

    def extend(self, slot: int, blocks: list[BlockHash]) -> None:
        """Append ``blocks``, held by ``slot`` alone and reported directly after the last one."""
        others = self.full & ~(1 << slot)
        for other in slots(others):
            self.partial[other] = self.all_bits
        new = ((1 << len(blocks)) - 1) << len(self)
        bits = self.bits(slot) | new
        self.full = 0
        self.blocks += blocks
        self._set(slot, bits)

    def delete(self, bits: int) -> list[BlockHash]:
        """Remove the blocks at ``bits`` from the node, with all their holders; return them."""
        gone: list[BlockHash] = []
        for start, stop in ranges(bits):
            gone += self.blocks[start:stop]
            self._close_gap(start, stop)
        self._normalise()
        return gone

    def take(self, start: int, stop: int) -> IndexNode:
        """Cut ``blocks[start:stop]`` out into a separate node; this one keeps the rest, which is not empty."""
        taken = IndexNode(self.blocks[start:stop], self.full, max(1, min(self.chained, stop) - start))
        taken.partial = {slot: bits >> start & taken.all_bits for slot, bits in self.partial.items()}
        taken.touched = self.touched
        self._close_gap(start, stop)
        self._normalise()
        taken._normalise()
        return taken

    def join(self, behind: IndexNode) -> None:
        """Append the blocks of ``behind`` to this node, all of which is proven. Invalidates ``behind``."""
        num, full = len(self), self.full & behind.full
        partial = {
            slot: self.bits(slot) | behind.bits(slot) << num for slot in slots((self.holders | behind.holders) & ~full)
        }
        self.blocks += behind.blocks
        self.chained += behind.chained
        self.full, self.partial = full, partial
        self._changed()
        self.touched |= behind.touched

    def trade(self, other: IndexNode) -> None:
        """Swap everything with ``other``: the larger content stays with the object that most hashes refer to."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    def common(self, chain: list[BlockHash], depth: int) -> int:
        """Return the number of leading blocks shared by ``chain[depth:]`` and the node, at least one; proves that many.

        A block hash identifies the whole prefix. So in a proven order, one equal hash means that all preceding ones are
        equal, and the last equal one is found by bisection; the rest is compared as lists.
        """
        span = min(len(self.blocks), len(chain) - depth)
        known = min(self.chained, span)
        if known <= COMPARED_BLOCKS:
            known = 0
        elif chain[depth + known - 1] != self.blocks[known - 1]:
            return self._bisect(chain, depth, known)
        if known < span:
            known += num_equal(self.blocks[known:span], chain[depth + known : depth + span])
            self.chained = max(self.chained, known)
        return known

    def _bisect(self, chain: list[BlockHash], depth: int, differing: int) -> int:
        equal = 1
        differing -= 1  # the block at place ``differing`` differs, those before ``equal`` are the same
        while equal < differing:
            middle = (equal + differing) // 2
            if chain[depth + middle] == self.blocks[middle]:
                equal = middle + 1
            else:
                differing = middle
        return equal

    def _close_gap(self, start: int, stop: int) -> None:
        del self.blocks[start:stop]
        front = (1 << start) - 1
        for slot, bits in self.partial.items():
            self.partial[slot] = bits & front | bits >> stop << start
        self.chained = max(1, min(self.chained, start))
        self._changed()

    def _changed(self) -> None:
        self._runs = self.answer = None

    def _set(self, slot: int, bits: int) -> None:
        self._changed()
        self.partial.pop(slot, None)
        if bits == self.all_bits:
            self.full |= 1 << slot
        elif bits:
            self.partial[slot] = bits

    def _normalise(self) -> None:
        """Drop bitmaps that became empty or full by a change of length."""
        if self.partial:
            for slot, bits in list(self.partial.items()):
                self._set(slot, bits)

    def check(self) -> None:
        assert 1 <= self.chained <= len(self.blocks), self
        union = self.all_bits if self.full else 0
        for slot, bits in self.partial.items():
            assert 0 < bits < self.all_bits, self
            assert not self.full >> slot & 1, self
            union |= bits
        assert union == self.all_bits, f"{self} has blocks that nobody holds"


def num_equal(one: list[BlockHash], other: list[BlockHash]) -> int:
    """Return the number of leading blocks shared by two lists of equal length."""
    if one == other:
        return len(one)
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


class HolderSlots:
    """Mapping holder <-> slot, a small number, so that a set of holders is an int; and each holder's number of blocks.

    A slot is free again when its holder holds nothing; the lowest free one is assigned next, so that sets stay small
    ints while workers come and go. With workers a, b, c in slots 0, 1, 2 the set {a, c} is 0b101; after b leaves, a new
    worker d gets slot 1.
    """

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
