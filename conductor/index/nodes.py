"""A node of the prefix index: a stretch of blocks, and for each holder a bitmap of those it has.

Owns the blocks' order, the bitmaps and what is *proven* of the order. Does not know hashes' nodes, holders' names or
events; a holder is a slot number here, a set of holders an int with the bits of their slots.

Bit p of a bitmap stands for ``blocks[p]``. Holders of the whole node are bits of ``full`` alone; the others have a
bitmap in ``partial``. Of a node of 5 blocks that slot 0 holds all of and slot 3 all but ``blocks[2]``:

    full = 0b0001, partial = {3: 0b11011}

and slot 3's leading run is the number of trailing ones, 2. Cutting and joining nodes are shifts of such ints.

The first ``chained`` blocks are known to follow each other on one chain, since a prompt was compared with them. What
is behind them stands in the order in which it was told, which may mean nothing.

``answer`` is the index's: the leading run of each holder by name; None once blocks or a bitmap have changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tanghulu.types import BlockHash, InstanceId

#: Up to this many blocks are compared one by one even where the order is proven: it costs no more than a bisection.
COMPARED_BLOCKS = 32


def slots(holders: int) -> Iterator[int]:
    """The slots whose bits are set, lowest first: 0b1001 is 0, 3."""
    while holders:
        lowest = holders & -holders
        yield lowest.bit_length() - 1
        holders ^= lowest


def leading_ones(bits: int) -> int:
    """The number of leading ones, the first blocks that are held: 3 of 0b10111."""
    return (bits ^ (bits + 1)).bit_length() - 1


def ranges(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of ones as (start, stop), highest first: 0b110011 is (4, 6), (0, 2)."""
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
        """Slot, the slot's bit and the leading run of each holder with a bitmap; kept until a bitmap changes."""
        if self._runs is None:
            self._runs = [(slot, 1 << slot, leading_ones(bits)) for slot, bits in self.partial.items()]
        return self._runs

    def leads(self, chain: list[BlockHash]) -> bool:
        """Return whether ``chain`` surely begins with all blocks of the node. ``chain[0]`` is one of them."""
        num = len(self.blocks)
        return self.chained == num <= len(chain) and chain[num - 1] == self.blocks[-1]

    def ends_backwards(self, blocks: list[BlockHash]) -> bool:
        """Return whether every holder has the whole node, and it ends with ``blocks``, the last one first."""
        return not self.partial and self.blocks[: -len(blocks) - 1 : -1] == blocks

    def shorten(self, num_blocks: int) -> list[BlockHash]:
        """Take the last ``num_blocks`` (not all) out of a node that every holder has whole; returns them."""
        gone = self.blocks[-num_blocks:]
        del self.blocks[-num_blocks:]
        self.chained = min(self.chained, len(self.blocks))
        self._changed()
        return gone

    def num_partial_if(self, behind: IndexNode) -> int:
        """The number of holders that would have a bitmap if ``behind`` were joined."""
        return ((self.holders | behind.holders) & ~(self.full & behind.full)).bit_count()

    def ahead(self, blocks: list[BlockHash]) -> tuple[int, int]:
        """(place, how many) of a front part of ``blocks`` that reaches its end or the node's; (0, 0) if none does."""
        own = self.blocks
        first = 0 if blocks[0] == own[0] else own.index(blocks[0])
        num = min(len(blocks), len(own) - first)
        return (first, num) if own[first : first + num] == blocks[:num] else (0, 0)

    def stretch(self, blocks: list[BlockHash], held: int = 0) -> int:
        """The bitmap of ``blocks`` if they are a stretch, backwards (as tails are evicted) or ahead; else 0.

        ``blocks[0]`` is in the node. ``held``: the bitmap of who tells them; who evicts from the tail begins with the
        last block that it holds, which saves the search.
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
        """The bitmap of ``blocks``, all of which are in the node, in any order."""
        place_of = {block: place for place, block in enumerate(self.blocks)}
        bits = 0
        for place in map(place_of.__getitem__, blocks):
            bits |= 1 << place
        return bits

    def hold(self, slot: int, bits: int) -> int:
        """Add ``bits`` to the blocks of ``slot``; returns how many of them are new."""
        before = self.bits(slot)
        self._set(slot, before | bits)
        return (bits & ~before).bit_count()

    def release(self, slot: int, bits: int) -> tuple[int, int]:
        """Take ``bits`` from ``slot``; returns how many it had, and the bitmap of those without a holder now."""
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
        """Append ``blocks``, which ``slot`` alone has; they were told right behind the last one."""
        others = self.full & ~(1 << slot)
        for other in slots(others):
            self.partial[other] = self.all_bits
        new = ((1 << len(blocks)) - 1) << len(self)
        bits = self.bits(slot) | new
        self.full = 0
        self.blocks += blocks
        self._set(slot, bits)

    def delete(self, bits: int) -> list[BlockHash]:
        """Take the blocks at ``bits`` out of the node, with all their holders; returns them."""
        gone: list[BlockHash] = []
        for start, stop in ranges(bits):
            gone += self.blocks[start:stop]
            self._close_gap(start, stop)
        self._normalise()
        return gone

    def take(self, start: int, stop: int) -> IndexNode:
        """Cut ``blocks[start:stop]`` out into a node of its own; this one keeps the rest, which is not empty."""
        taken = IndexNode(self.blocks[start:stop], self.full, max(1, min(self.chained, stop) - start))
        taken.partial = {slot: bits >> start & taken.all_bits for slot, bits in self.partial.items()}
        taken.touched = self.touched
        self._close_gap(start, stop)
        self._normalise()
        taken._normalise()
        return taken

    def join(self, behind: IndexNode) -> None:
        """Put the blocks of ``behind`` behind the own ones, all of which are proven. ``behind`` is of no use then."""
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
        """Swap everything with ``other``: the larger content stays with the object that most hashes lead to."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    def common(self, chain: list[BlockHash], depth: int) -> int:
        """How many leading blocks ``chain[depth:]`` and the node have in common, at least one; proves that much.

        A block hash stands for the whole prefix. So where the order is proven, one equal hash means that all in front
        are equal, and the last equal one is found by bisection; the rest is compared as lists.
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
        differing -= 1  # the block at place ``differing`` is another one, those in front of ``equal`` are the same
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
        """Drop bitmaps that a change of length has made empty or full."""
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
    """The number of leading blocks that two lists of one length have in common."""
    if one == other:
        return len(one)
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
