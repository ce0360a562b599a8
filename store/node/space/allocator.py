"""Free bytes of a segment: a best-fit allocator of offsets for values of any size, and one fence in it.

Pure arithmetic over [0, capacity); it knows nothing of chunks, and remembers only free ranges: the holder of a range
states its length when returning it. Free ranges never touch each other: a freed range merges with its free neighbours
at once. Best fit (the smallest free range that is large enough, the lowest offset among equals) keeps large holes for
large values; KV chunks mostly have one size, so a victim's hole is filled exactly by its successor.

A part of the segment can be *fenced* while it is being vacated: free ranges there are not allocated, and do not merge
with free ranges outside, until all of it is free and taken, or the fence is lifted.

Worked example, capacity 1024, alignment 64: allocate(100) -> offset 0 (128 taken), allocate(64) -> 128, allocate(64) ->
192; free(128, 64) leaves holes [128,192) and [256,1024); allocate(10) takes the smaller one, offset 128. free(0, 100),
free(128, 10), free(192, 64) merge into one hole of 1024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from sortedcontainers import SortedDict, SortedList

from tanghulu.errors import InvalidRequest
from tanghulu.store.node.space.frames import Frames

DEFAULT_ALIGNMENT = 64
OnTaken = Callable[[int, int], None]


def ignore_taken(offset: int, length: int) -> None:
    """Do nothing with a taken range."""


class OffsetAllocator:
    """Every call is O(log n) in the number of free ranges. Sizes are rounded up to ``alignment``.

    ``on_taken`` is called with the offset and length of each allocated range.
    """

    def __init__(
        self, capacity_bytes: int, alignment: int = DEFAULT_ALIGNMENT, on_taken: OnTaken = ignore_taken
    ) -> None:
        if capacity_bytes < alignment or alignment & (alignment - 1):
            raise InvalidRequest(f"capacity {capacity_bytes} must hold one unit of {alignment} (a power of two)")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self.used_bytes = 0  # rounding included
        self._by_offset = SortedDict({0: self.capacity_bytes})  # start of a free range -> its length
        self._by_length = SortedList([(self.capacity_bytes, 0)])  # (length, start) of the same ranges, if not fenced
        self.fence = (0, 0)  # the fenced range [start, end); (0, 0) means none
        self._on_taken = on_taken
        self.frames = Frames(self.capacity_bytes, alignment)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, fenced ones included; not necessarily contiguous."""
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest value that would fit now."""
        return int(self._by_length[-1][0]) if self._by_length else 0

    def rounded(self, size_bytes: int) -> int:
        """Return the bytes taken by a value of ``size_bytes``."""
        return -(-size_bytes // self.alignment) * self.alignment

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a free range of ``size_bytes`` (> 0), now taken; None if no hole is large enough."""
        assert size_bytes > 0
        wanted = self.rounded(size_bytes)
        position = self._by_length.bisect_left((wanted, -1))
        if position == len(self._by_length):
            return None
        length, offset = self._by_length.pop(position)
        del self._by_offset[offset]
        if length > wanted:
            self._insert(offset + wanted, length - wanted)
        self._take(offset, wanted)
        return int(offset)

    def claim(self, offset: int, size_bytes: int) -> bool:
        """Take the range at ``offset`` (aligned), as ``allocate`` would have; False if it is not all free."""
        length = self.rounded(size_bytes)
        position = self._by_offset.bisect_right(offset) - 1
        if position < 0:
            return False
        start, hole = self._by_offset.peekitem(position)
        if offset + length > start + hole:
            return False
        self._delete(start, hole)
        if offset > start:
            self._insert(start, offset - start)
        if offset + length < start + hole:
            self._insert(offset + length, start + hole - offset - length)
        self._take(offset, length)
        return True

    def _take(self, offset: int, length: int) -> None:
        self._on_taken(offset, length)
        self.used_bytes += length
        self.frames.taken(offset, length)

    def free(self, offset: int, size_bytes: int) -> None:
        """Free the range that ``allocate(size_bytes)`` returned as ``offset``; asserts that it is taken."""
        length = self.rounded(size_bytes)
        assert 0 <= offset <= self.capacity_bytes - length, f"[{offset}, +{length}) is not inside the segment"
        self.used_bytes -= length
        self.frames.freed(offset, length)
        if self.fence[1]:
            for border in self.fence:  # a range may extend over either end
                if offset < border < offset + length:
                    self._melt(offset, border - offset)
                    offset, length = border, offset + length - border
        self._melt(offset, length)

    def _melt(self, offset: int, length: int) -> None:
        """Merge a free range with its free neighbours on the same side of the fence, and enter the result."""
        start, end = offset, offset + length
        position = self._by_offset.bisect_left(offset)
        if position < len(self._by_offset):
            after, after_length = self._by_offset.peekitem(position)
            assert end <= after, f"[{offset}, {end}) is free already from {after} on"
            if end == after and end not in self.fence:
                self._delete(after, after_length)
                end += after_length
        if position:
            before, before_length = self._by_offset.peekitem(position - 1)
            assert before + before_length <= offset, f"{offset} is free already, as part of [{before}, ...)"
            if before + before_length == offset and offset not in self.fence:
                self._delete(before, before_length)
                start = before
        self._insert(start, end - start)

    # --- the fence

    def raise_fence(self, start: int, end: int) -> None:
        """Allocate nothing of [start, end) from now on; asserts that nothing is fenced yet."""
        assert self.fence == (0, 0), "one fence at a time"
        assert 0 <= start < end <= self.capacity_bytes
        position = max(self._by_offset.bisect_right(start) - 1, 0)
        inside = []
        for offset in self._by_offset.islice(position):
            if offset >= end:
                break
            if offset + self._by_offset[offset] > start:
                inside.append((offset, self._by_offset[offset]))
        for offset, length in inside:
            self._delete(offset, length)
        self.fence = (start, end)
        for offset, length in inside:
            cuts = [offset, *(border for border in self.fence if offset < border < offset + length), offset + length]
            for begin, stop in pairwise(cuts):
                self._insert(begin, stop - begin)

    def lift_fence(self) -> None:
        """Allow allocation inside the fence again; does nothing without a fence."""
        start, end = self.fence
        inside = [(offset, self._by_offset[offset]) for offset in self._by_offset.irange(start, end, (True, False))]
        for offset, length in inside:
            self._delete(offset, length)
        self.fence = (0, 0)
        for offset, length in inside:
            self._melt(offset, length)

    def hole_at(self, offset: int) -> int:
        """Return the length of the free range that begins at ``offset``; 0 if none does."""
        return int(self._by_offset.get(offset, 0))

    def _insert(self, offset: int, length: int) -> None:
        self._by_offset[offset] = length
        if not self.fence[0] <= offset < self.fence[1]:
            self._by_length.add((length, offset))

    def _delete(self, offset: int, length: int) -> None:
        del self._by_offset[offset]
        if not self.fence[0] <= offset < self.fence[1]:
            self._by_length.remove((length, offset))

    def check(self) -> None:
        """Assert that free ranges touch only at the fence, and that free + used == capacity."""
        position = -1
        for offset, length in self._by_offset.items():
            touches = offset == position and offset in self.fence
            assert offset > position or touches, f"free ranges touch or overlap at {offset}"
            assert not any(offset < border < offset + length for border in self.fence), "a range crosses the fence"
            assert length > 0
            assert length % self.alignment == 0
            position = offset + length
        assert position <= self.capacity_bytes
        assert self.used_bytes + sum(self._by_offset.values()) == self.capacity_bytes
        start, end = self.fence
        outside = ((n, o) for o, n in self._by_offset.items() if not start <= o < end)
        assert sorted(outside) == list(self._by_length)

    def holes(self) -> list[tuple[int, int]]:
        """Return (offset, length) of all free ranges."""
        return list(self._by_offset.items())

    def check_tiles(self, taken: Iterable[tuple[int, int]]) -> None:
        """Assert that ``taken``, as (offset, size), and the free ranges tile the capacity without gap or overlap."""
        ranges = [*self._by_offset.items(), *((offset, self.rounded(size)) for offset, size in taken)]
        position = 0
        for offset, length in sorted(ranges):
            assert offset == position, f"gap or overlap at {position}: next range starts at {offset}"
            position = offset + length
        assert position == self.capacity_bytes

    def __repr__(self) -> str:
        return f"OffsetAllocator({self.used_bytes}/{self.capacity_bytes} B, {len(self._by_offset)} holes)"
