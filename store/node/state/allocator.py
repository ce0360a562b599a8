"""Which bytes of a segment are free: a best-fit allocator of offsets for values of any size.

Pure arithmetic over [0, capacity); it knows nothing of chunks, and remembers only what is free: whoever holds a range
says how long it is when giving it back. Free ranges never touch each other: a range
that is freed melts with its free neighbours at once. Best fit (the smallest free range that is large enough, the
lowest offset among equals) keeps large holes for large values; KV chunks mostly have one size, so a victim's
hole is filled exactly by its successor.

Worked example, capacity 1024, alignment 64: allocate(100) -> offset 0 (128 taken), allocate(64) -> 128,
allocate(64) -> 192; free(128, 64) leaves holes [128,192) and [256,1024); allocate(10) takes the smaller one,
offset 128. free(0, 100), free(128, 10), free(192, 64) melt into one hole of 1024.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedDict, SortedList

from tanghulu.errors import InvalidRequest

DEFAULT_ALIGNMENT = 64


class OffsetAllocator:
    """Every call is O(log n) in the number of free ranges. Sizes are rounded up to ``alignment``."""

    def __init__(self, capacity_bytes: int, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if capacity_bytes < alignment or alignment & (alignment - 1):
            raise InvalidRequest(f"capacity {capacity_bytes} must hold one unit of {alignment} (a power of two)")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self._used_bytes = 0
        self._by_offset = SortedDict({0: self.capacity_bytes})  # start of a free range -> its length
        self._by_length = SortedList([(self.capacity_bytes, 0)])  # (length, start) of the same ranges

    @property
    def used_bytes(self) -> int:
        """Bytes taken, rounding included."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not taken; not necessarily in one piece."""
        return self.capacity_bytes - self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest value that would fit now."""
        return int(self._by_length[-1][0]) if self._by_length else 0

    def rounded(self, size_bytes: int) -> int:
        """What a value of ``size_bytes`` takes."""
        return -(-size_bytes // self.alignment) * self.alignment

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a free range of ``size_bytes`` (> 0), now taken; None if no hole is large enough."""
        assert size_bytes > 0
        wanted = self.rounded(size_bytes)
        position = self._by_length.bisect_left((wanted, -1))
        if position == len(self._by_length):
            return None
        length, offset = self._by_length.pop(position)
        del self._by_offset[offset]
        if length > wanted:
            self._insert(offset + wanted, length - wanted)
        self._used_bytes += wanted
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
        self._used_bytes += length
        return True

    def free(self, offset: int, size_bytes: int) -> None:
        """Give back the range that ``allocate(size_bytes)`` returned as ``offset``; asserts that it is taken."""
        length = self.rounded(size_bytes)
        self._used_bytes -= length
        start, end = offset, offset + length
        position = self._by_offset.bisect_left(offset)
        if position < len(self._by_offset):
            after, after_length = self._by_offset.peekitem(position)
            assert end <= after, f"[{offset}, {end}) is free already from {after} on"
            if end == after:
                self._delete(after, after_length)
                end += after_length
        if position:
            before, before_length = self._by_offset.peekitem(position - 1)
            assert before + before_length <= offset, f"{offset} is free already, as part of [{before}, ...)"
            if before + before_length == offset:
                self._delete(before, before_length)
                start = before
        assert end <= self.capacity_bytes, f"[{offset}, +{length}) is not inside the segment"
        self._insert(start, end - start)

    def _insert(self, offset: int, length: int) -> None:
        self._by_offset[offset] = length
        self._by_length.add((length, offset))

    def _delete(self, offset: int, length: int) -> None:
        del self._by_offset[offset]
        self._by_length.remove((length, offset))

    def check(self) -> None:
        """Assert that free ranges do not touch, and that free + used == capacity."""
        position = -1
        for offset, length in self._by_offset.items():
            assert offset > position, f"free ranges touch or overlap at {offset}"
            assert length > 0
            assert length % self.alignment == 0
            position = offset + length
        assert position <= self.capacity_bytes
        assert self._used_bytes + sum(self._by_offset.values()) == self.capacity_bytes
        assert sorted((n, o) for o, n in self._by_offset.items()) == list(self._by_length)

    def check_tiles(self, taken: Iterable[tuple[int, int]]) -> None:
        """Assert that ``taken``, as (offset, size), and the free ranges tile the capacity without gap or overlap."""
        ranges = [*self._by_offset.items(), *((offset, self.rounded(size)) for offset, size in taken)]
        position = 0
        for offset, length in sorted(ranges):
            assert offset == position, f"gap or overlap at {position}: next range starts at {offset}"
            position = offset + length
        assert position == self.capacity_bytes

    def __repr__(self) -> str:
        return f"OffsetAllocator({self._used_bytes}/{self.capacity_bytes} B, {len(self._by_offset)} holes)"
