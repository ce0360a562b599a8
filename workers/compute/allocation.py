"""Keeps the memory of a step's tensors with the process instead of fetching it from the kernel at every operation.

glibc gives large blocks back to the kernel as soon as they are freed. A step of 512 tokens makes tensors of 1 to 6 MB
by the hundred, and their first touch costs a page fault every 4 KiB: an RMSNorm took 1,566 us instead of 135 so.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

# mallopt's names for its parameters, from malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

#: Blocks up to this come from the heap; the largest that glibc allows.
_LARGEST_ON_HEAP = 32 << 20
#: Free memory at the heap's end beyond which it goes back to the kernel.
_KEEP_FREE_BYTES = 512 << 20


@cache
def keep_large_blocks() -> bool:
    """Let this process reuse freed memory; whether its C library could be told (glibc's can)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and libc.mallopt(_TRIM_THRESHOLD, _KEEP_FREE_BYTES))
