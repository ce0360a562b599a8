"""Which bytes of a segment are free: a best-fit allocator of offsets for values of any size.

Pure arithmetic over [0, capacity); it knows nothing of chunks. Free ranges never touch each other: a range
that is freed melts with its free neighbours at once. Best fit (the smallest free range that is large enough, the
lowest offset among equals) keeps large holes for large values; KV chunks mostly have one size, so a victim's
hole is filled exactly by its successor.

Worked example, capacity 1024, alignment 64: allocate(100) -> offset 0 (128 taken), allocate(64) -> 128,
allocate(64) -> 192; free(128, 64) leaves holes [128,192) and [256,1024); allocate(10) takes the smaller one,
offset 128. free(0, 100), free(128, 10), free(192, 64) melt into one hole of 1024.
"""

from __future__ import annotations

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
        self._taken: dict[int, int] = {}  # offset -> rounded length

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
        self._taken[offset] = wanted
        self._used_bytes += wanted
        return int(offset)

    def free(self, offset: int) -> None:
        """Give back the range that ``allocate`` returned as ``offset``; asserts that it is taken."""
        length = self._taken.pop(offset, 0)
        assert length, f"offset {offset} is not allocated"
        self._used_bytes -= length
        start, end = offset, offset + length
        position = self._by_offset.bisect_left(offset)
        if position:
            before, before_length = self._by_offset.peekitem(position - 1)
            if before + before_length == offset:
                self._delete(before, before_length)
                start = before
        after_length = self._by_offset.get(end)
        if after_length is not None:
            self._delete(end, after_length)
            end += after_length
        self._insert(start, end - start)

    def _insert(self, offset: int, length: int) -> None:
        self._by_offset[offset] = length
        self._by_length.add((length, offset))

    def _delete(self, offset: int, length: int) -> None:
        del self._by_offset[offset]
        self._by_length.remove((length, offset))

    def check(self) -> None:
        """Assert that taken and free ranges tile the capacity, and that no two free ranges touch."""
        ranges = [(o, n, True) for o, n in self._by_offset.items()] + [(o, n, False) for o, n in self._taken.items()]
        position, was_free = 0, False
        for offset, length, is_free in sorted(ranges):
            assert offset == position, f"gap or overlap at {position}: next range starts at {offset}"
            assert length > 0
            assert length % self.alignment == 0
            assert not (is_free and was_free), f"free ranges touch at {offset}"
            position, was_free = offset + length, is_free
        assert position == self.capacity_bytes
        assert self._used_bytes == sum(self._taken.values())
        assert sorted((n, o) for o, n in self._by_offset.items()) == list(self._by_length)

    def __repr__(self) -> str:
        return f"OffsetAllocator({self._used_bytes}/{self.capacity_bytes} B, {len(self._by_offset)} holes)"
