"""Memory registered in advance, through which small buffers are copied: registering them would cost more.

Owns the memory and its free slots; the transport registers it.
"""

from __future__ import annotations

import ctypes
import mmap

from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.slices import Opcode, Slice

#: Largest buffer that is copied through a slot.
STAGED_BYTES = 64 << 10


class StagedSlots:
    """``num_slots`` places of STAGED_BYTES; used by one thread at a time."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.memory = Buffer(mmap.mmap(-1, num_slots * STAGED_BYTES))
        self._free = list(range(num_slots))

    def has_room_for(self, piece: Slice) -> bool:
        """Return whether the slice needs no slot, or one is free."""
        return piece.buffer.size_bytes > STAGED_BYTES or bool(self._free)

    def take(self, piece: Slice) -> int | None:
        """Return a slot for the slice, holding a WRITE's bytes; None for a large buffer. See ``has_room_for`` first."""
        if piece.buffer.size_bytes > STAGED_BYTES:
            return None
        slot = self._free.pop()
        if piece.opcode is Opcode.WRITE:
            ctypes.memmove(self.address(slot), piece.buffer.address + piece.local_offset, piece.length)
        return slot

    def put(self, slot: int, arrived: Slice | None = None) -> None:
        """Take back an untouched slot; a READ that has ``arrived`` there is copied to its destination."""
        if arrived is not None and arrived.opcode is Opcode.READ:
            ctypes.memmove(arrived.buffer.address + arrived.local_offset, self.address(slot), arrived.length)
        self._free.append(slot)

    def address(self, slot: int) -> int:
        """Return the address at which the slot begins."""
        return self.memory.address + slot * STAGED_BYTES

    def check(self) -> None:
        """Assert the invariants: no slot is free twice."""
        assert len(set(self._free)) == len(self._free) <= self.num_slots

    @property
    def idle(self) -> bool:
        """Whether no slot is in use."""
        return len(self._free) == self.num_slots
