"""One area of page-aligned memory in equal pieces; every page is touched. The standard library only."""

from __future__ import annotations

import ctypes
import mmap


class Memory:
    """``num_pieces`` pieces of ``piece_bytes`` each, behind one another."""

    def __init__(self, num_pieces: int, piece_bytes: int) -> None:
        self.num_pieces, self.piece_bytes = num_pieces, piece_bytes
        self._area = mmap.mmap(-1, num_pieces * piece_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        self.view = memoryview(self._area)
        ctypes.memset(self.address, 1, num_pieces * piece_bytes)

    def piece(self, number: int) -> memoryview:
        """Piece ``number``."""
        return self.view[number * self.piece_bytes : (number + 1) * self.piece_bytes]
