"""Copies between local memory and a mapped segment. Owns the choice of the instruction, nothing else.

memmove is nearly always right. A long one releases the GIL, so that several callers copy at once; a short one keeps it:
it takes some microseconds, and getting the GIL back from other callers takes longer (8 callers of 64 KiB were half as
fast together as one alone). glibc uses ``rep movsb`` for middle lengths, though, and that is several times slower on
AMD's processors when the destination lies 1 to 31 bytes behind the source modulo the page size. This is common: chunks
start on page boundaries, and large numpy arrays and bytearrays at a page boundary plus 16. Measured (EPYC, glibc 2.36,
destination 16 behind): 64 KiB 23 us instead of 4, 256 KiB 145 us instead of 12. A vector loop of numpy (``np.positive``
copies unsigned bytes, also without the GIL) is unaffected: 5 us and 16 us.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PAGE_BYTES = 4096
_SLOW_DISTANCES = 32
_SLOW_FROM_BYTES, _SLOW_TO_BYTES = 4 << 10, 512 << 10
#: Longest copy that keeps the GIL.
_SHORT_BYTES = 128 << 10
_memmove = ctypes.memmove
_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_with_gil.restype = None


class Memory(Protocol):
    """Bytes with their address, because requesting it from numpy costs more than a small copy."""

    array: Bytes
    address: int


def copy(to: Memory, to_offset: int, source: Memory, source_offset: int, length: int) -> None:
    """Copy ``length`` bytes; the caller has checked the ranges."""
    to_address, from_address = to.address + to_offset, source.address + source_offset
    distance = (to_address - from_address) % _PAGE_BYTES
    if 0 < distance < _SLOW_DISTANCES and _SLOW_FROM_BYTES <= length < _SLOW_TO_BYTES:
        into = to.array[to_offset : to_offset + length]
        np.positive(source.array[source_offset : source_offset + length], out=into)
    elif length <= _SHORT_BYTES:
        _memmove_with_gil(to_address, from_address, length)
    else:
        _memmove(to_address, from_address, length)
