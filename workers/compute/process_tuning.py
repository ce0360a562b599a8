"""Settings of a worker's process that steps on the CPU need: how OpenMP's threads wait, and what malloc keeps.

Imports no torch, because OpenMP reads its settings once, when torch loads it: call `wait_shortly` before that.

glibc gives large blocks of memory back to the kernel as soon as they are freed. A step of 512 tokens makes tensors of 1
to 6 MB by the hundred, and the first touch of such a tensor costs a page fault every 4 KiB: an RMSNorm took 1,566 us
instead of 135. `keep_large_blocks` keeps that memory with the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

# How many times a thread looks for work in libgomp's waiting loop before it sleeps: some 0.1 ms, as long as what lies
# between two products.
_SPINS = 10_000

# mallopt's names for its parameters, from malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

#: Blocks up to this come from the heap; the largest that glibc allows.
_LARGEST_ON_HEAP = 32 << 20
#: Free memory at the heap's end beyond which it goes back to the kernel.
_KEEP_FREE_BYTES = 512 << 20


def wait_shortly() -> None:
    """Let threads of this process look for work a moment, then sleep; unless the environment says otherwise.

    Threads that never sleep starve the worker beside them: a decode next to a prefill on two cores made 17 tokens/s
    with sleeping threads, and 5 with spinning ones. Threads that sleep at once are woken at every product of a decode.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


@cache
def keep_large_blocks() -> bool:
    """Let this process reuse freed memory; return whether its C library could be told (glibc's can)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and libc.mallopt(_TRIM_THRESHOLD, _KEEP_FREE_BYTES))
