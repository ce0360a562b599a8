"""Memory for values copied to this client: large pieces are reused when no references are left.

Fresh memory costs as much as the copy: the kernel clears each of its pages at the first touch (16 MiB: 4,096 page
faults, 3 ms and more). A piece returns when its last array, view or tensor is dropped. Idle memory is bounded, and
available to the kernel under pressure (MADV_FREE): a page not taken meanwhile is reused without a fault.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: Smaller values come from the heap, which reuses its memory by itself.
MIN_BYTES = 1 << 20
#: Bytes kept by a client for the next values.
MAX_IDLE_BYTES = 512 << 20
#: A piece has one of eight sizes between two powers of two: at most an eighth of it is unused.
_STEPS_LOG2 = 3
_HUGE_BYTES = 4 << 20


class _Area(NamedTuple):
    mapping: mmap.mmap
    address: int


class ReceiveMemory:
    """Pieces of memory by size. Every step is one operation of a deque or dict: safe from any thread and from GC."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: dict[int, deque[_Area]] = {}

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return writable memory of ``num_bytes``, with undefined contents, reserved while the array is referenced."""
        if num_bytes < MIN_BYTES:
            return np.empty(num_bytes, np.uint8)
        size = piece_bytes(num_bytes)
        try:
            area = self._idle[size].pop()
        except (KeyError, IndexError):
            area = _new_area(size)
        return np.asarray(_Lent(self, area, num_bytes))

    def give_back(self, area: _Area) -> None:
        """Take back unreferenced memory. Beyond the bound, pieces of other sizes are released first, then this one."""
        size = len(area.mapping)
        others = [idle for other, idle in list(self._idle.items()) if other != size]
        while self.idle_bytes + size > self._max_idle_bytes:
            found = next((idle for idle in others if idle), None)
            if found is None:
                return
            with contextlib.suppress(IndexError):  # another thread took it
                found.popleft()
        area.mapping.madvise(mmap.MADV_FREE)
        self._idle.setdefault(size, deque()).append(area)

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for the next values."""
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def check(self) -> None:
        """Assert the invariants: every piece lies with those of its size."""
        for size, idle in list(self._idle.items()):
            assert all(len(area.mapping) == size for area in list(idle))


class _Lent:
    """A lent piece, while references to it exist, as numpy's array interface."""

    __slots__ = ("__array_interface__", "_area", "_owner")

    def __init__(self, owner: ReceiveMemory, area: _Area, num_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (area.address, False),
            "version": 3,
        }
        self._area, self._owner = area, owner

    def __del__(self) -> None:
        self._owner.give_back(self._area)


def piece_bytes(num_bytes: int) -> int:
    """Return the size of the piece for a value: 16 MiB for 16 MiB, 18 MiB for 16 MiB and a byte."""
    step = 1 << max(12, (num_bytes - 1).bit_length() - 1 - _STEPS_LOG2)
    return -(-num_bytes // step) * step


def _new_area(size: int) -> _Area:
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages has small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return _Area(mapping, np.frombuffer(mapping, np.uint8).__array_interface__["data"][0])
