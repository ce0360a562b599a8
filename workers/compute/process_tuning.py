"""Settings of a worker's process for steps on the CPU: OpenMP threads' waiting, and memory kept by malloc.

Imports no torch, because OpenMP reads its settings once, when torch loads it: call `wait_shortly` before that.

glibc returns large blocks of memory to the kernel as soon as they are freed. A step of 512 tokens makes tensors of 1 to
6 MB by the hundred, and the first touch of such a tensor costs a page fault every 4 KiB: an RMSNorm took 1,566 us
instead of 135. `keep_large_blocks` keeps that memory with the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

# Iterations of libgomp's waiting loop before a thread sleeps: some 0.1 ms, as long as the gap between two products.
_SPINS = 10_000

# mallopt's names for its parameters, from malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

#: Largest blocks taken from the heap; the most that glibc allows.
_LARGEST_ON_HEAP = 32 << 20
#: Free memory at the heap's end beyond which it is returned to the kernel.
_KEEP_FREE_BYTES = 512 << 20


def wait_shortly() -> None:
    """Let threads of this process spin briefly for work, then sleep; unless the environment sets otherwise.

    Threads that never sleep starve the neighbouring worker: a decode next to a prefill on two cores made 17 tokens/s
    with sleeping threads, and 5 with spinning ones. Threads that sleep at once are woken at every product of a decode.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


@cache
def keep_large_blocks() -> bool:
    """Let this process reuse freed memory; return whether its C library supports that (glibc does)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and libc.mallopt(_TRIM_THRESHOLD, _KEEP_FREE_BYTES))
