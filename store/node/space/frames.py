"""Cheapest window of a segment to vacate: sums over frames of equal size, without a search over chunks.

The segment is divided into at most ``MAX_FRAMES`` frames of a power of two. Each frame has a count of its free bytes
and of its *loose* bytes: held by residents that can be moved or dropped. All other bytes are fixed (reservations, write
buffers, leased chunks), and a window with such bytes cannot be vacated. The cost of a window, a run of whole frames, is
the bytes of its residents, including those that extend over its two ends.

Example, frames of 1 MiB: a frame with three residents of 300 KiB, of which the last extends 100 KiB into the next
frame, has 924 KiB free or loose as 124 + 800, and costs 900 KiB as a window of its own.

Each change is O(1) for a range inside one frame; ``cheapest`` is a few vector operations over all frames, 0.15 ms.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

MAX_FRAMES = 1 << 14
#: Beyond this many frames a range is entered by a vector operation.
_LONG = 16


class Window(NamedTuple):
    """[start, end) of the segment. ``spill_bytes``: bytes of residents inside that extend over its two ends."""

    start: int
    end: int
    spill_bytes: int


class Frames:
    """See the module. Everything is free at the start."""

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        least = max(alignment, -(-capacity_bytes // MAX_FRAMES))
        self._shift = (least - 1).bit_length()
        self.frame_bytes = 1 << self._shift
        self._capacity_bytes = capacity_bytes
        self.num_frames = -(-capacity_bytes // self.frame_bytes)
        self._sizes = np.full(self.num_frames, self.frame_bytes, np.int64)
        self._sizes[-1] = capacity_bytes - (self.num_frames - 1) * self.frame_bytes
        self._free = array("q", self._sizes.tobytes())
        self._loose = array("q", bytes(8 * self.num_frames))
        #: Extent to either side of a frame's beginning of the loose resident across it.
        self._before = array("q", bytes(8 * (self.num_frames + 1)))
        self._behind = array("q", bytes(8 * (self.num_frames + 1)))

    def window_bytes(self, size_bytes: int) -> int:
        """Return the length of a window for a value of that size."""
        return min(-(-size_bytes // self.frame_bytes) * self.frame_bytes, self._capacity_bytes)

    def freed(self, offset: int, length: int) -> None:
        """Record that the range is free."""
        self._add(self._free, offset, length, 1)

    def taken(self, offset: int, length: int) -> None:
        """Record that the range is no longer free."""
        self._add(self._free, offset, length, -1)

    def loosened(self, offset: int, length: int) -> None:
        """Record that the range's resident can be moved or dropped."""
        if self._add(self._loose, offset, length, 1):
            self._straddle(offset, length, 1)

    def fixed(self, offset: int, length: int) -> None:
        """Record that the range's resident cannot be moved, or has left."""
        if self._add(self._loose, offset, length, -1):
            self._straddle(offset, length, 0)

    def begins(self, position: int) -> int:
        """Return the start of the loose resident across ``position``, where a frame begins; else ``position``."""
        return position - self._before[position // self.frame_bytes]

    def cheapest(self, size_bytes: int) -> Window | None:
        """Return the window for ``size_bytes`` with the least cost, the lowest of equals; None if there is none."""
        num = -(-size_bytes // self.frame_bytes)
        free, loose = np.frombuffer(self._free, np.int64), np.frombuffer(self._loose, np.int64)
        stays = _sums((self._sizes != free + loose).astype(np.int64), num)
        costs = _sums(loose, num) + np.frombuffer(self._before, np.int64)[: len(stays)]
        costs += np.frombuffer(self._behind, np.int64)[num:]
        costs[stays > 0] = np.iinfo(np.int64).max
        first = int(np.argmin(costs))
        if stays[first]:
            return None
        end = min((first + num) * self.frame_bytes, self._capacity_bytes)
        return Window(first * self.frame_bytes, end, self._before[first] + self._behind[first + num])

    def _add(self, sums: array[int], offset: int, length: int, sign: int) -> bool:
        """Add a range's bytes to ``sums``, or subtract them; return whether it is in several frames."""
        first, last = offset >> self._shift, offset + length - 1 >> self._shift
        if first == last:  # almost always
            sums[first] += sign * length
            return False
        size = self.frame_bytes
        sums[first] += sign * ((first + 1) * size - offset)
        sums[last] += sign * (offset + length - last * size)
        if last - first > _LONG:
            np.frombuffer(sums, np.int64)[first + 1 : last] += sign * size
        else:
            for index in range(first + 1, last):
                sums[index] += sign * size
        return True

    def _straddle(self, offset: int, length: int, present: int) -> None:
        size, end = self.frame_bytes, offset + length
        first, last = offset // size + 1, (end - 1) // size
        if last - first > _LONG:
            begins = np.arange(first, last + 1) * size
            np.frombuffer(self._before, np.int64)[first : last + 1] = (begins - offset) * present
            np.frombuffer(self._behind, np.int64)[first : last + 1] = (end - begins) * present
            return
        for index in range(first, last + 1):
            self._before[index] = (index * size - offset) * present
            self._behind[index] = (end - index * size) * present

    def check(self, free: list[tuple[int, int]], loose: list[tuple[int, int]]) -> None:
        """Assert that the sums match these ranges."""
        other = Frames(self._capacity_bytes, self.frame_bytes)
        other._free = array("q", bytes(8 * self.num_frames))
        for offset, length in free:
            other.freed(offset, length)
        for offset, length in loose:
            other.loosened(offset, length)
        assert other._free == self._free
        assert other._loose == self._loose
        assert other._before == self._before
        assert other._behind == self._behind

    def __repr__(self) -> str:
        return f"Frames({self.num_frames} of {self.frame_bytes} B)"


def _sums(values: np.ndarray[tuple[int], np.dtype[np.int64]], num: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the sum of every run of ``num`` neighbours."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[num:] - sums[:-num]
