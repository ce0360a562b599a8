"""Work requests and completions: as the engine expresses them, and as the bytes that the device reads and writes.

Pure but for its own memory; ``verbs`` hands its addresses to the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.transports.rdma import abi

#: Interval of signalled completions, in works and in bytes; the last work of every chain also signals. This gives fewer
#: completions to poll, no waiting in vain, and visible progress (a path without any is presumed dead).
SIGNAL_WORKS = 8
SIGNAL_BYTES = 1 << 20
_ACCESS_FAULTS = ("REM_ACCESS_ERR", "REM_INV_REQ_ERR", "LOC_PROT_ERR")


class WorkRequest(NamedTuple):
    """One one-sided operation. ``local_key`` covers the local range, ``remote_key`` the remote one."""

    work_id: int
    opcode: Opcode
    local_address: int
    local_key: int
    remote_address: int
    remote_key: int
    length: int


class WorkCompletion(NamedTuple):
    """The end of one signalled operation; ``fault`` is empty when it succeeded, and then all before it did too."""

    work_id: int
    fault: str
    flushed: bool
    access: bool


def which_tell(lengths: Sequence[int]) -> list[bool]:
    """Choose works of one chain that signal their end. Example of 1 MiB each: all; 64 KiB: every 8th and the last."""
    signalled: list[bool] = []
    num_works = num_bytes = 0
    for length in lengths:
        num_works, num_bytes = num_works + 1, num_bytes + length
        signalled.append(num_works == SIGNAL_WORKS or num_bytes >= SIGNAL_BYTES)
        if signalled[-1]:
            num_works = num_bytes = 0
    signalled[-1] = True
    return signalled


class PostRing:
    """Memory in which a chain of work requests is laid out for the device, one call for all of them.

    The device has taken what it needs when the call returns, so every chain begins in the first place. Example of three
    works: place 0 points to 1, 1 to 2, and 2 to nothing.
    """

    def __init__(self, max_works: int) -> None:
        size_bytes = abi.SEND_REQUEST.size
        self._memory = ctypes.create_string_buffer(max_works * size_bytes)
        self.address = ctypes.addressof(self._memory)
        self._places = [(n * size_bytes, self.address + n * size_bytes) for n in range(max_works)]
        self._size_bytes = size_bytes

    def fill(self, works: Sequence[WorkRequest], tell: Sequence[bool]) -> None:
        """Lay out the chain; works whose ``tell`` is true will signal their end."""
        pack, memory, size_bytes, last = abi.SEND_REQUEST.pack_into, self._memory, self._size_bytes, len(works) - 1
        read, write = abi.WR_RDMA_READ, abi.WR_RDMA_WRITE
        for number, (work, signalled, (offset, address)) in enumerate(zip(works, tell, self._places, strict=False)):
            pack(
                memory, offset, work.work_id, 0 if number == last else address + size_bytes, address + abi.SGE_OFFSET,
                1, read if work.opcode is Opcode.READ else write, abi.SEND_SIGNALED if signalled else 0,
                work.remote_address, work.remote_key, work.local_address, work.length, work.local_key,
            )  # fmt: skip


class CompletionRing:
    """Memory into which the device's completions are polled."""

    def __init__(self, max_works: int) -> None:
        self.max_works = max_works
        self._memory = ctypes.create_string_buffer(max_works * abi.COMPLETION.size)
        self._view = memoryview(self._memory).cast("B")
        self.address = ctypes.addressof(self._memory)

    def take(self, num: int) -> list[WorkCompletion]:
        """Return the first ``num``, as left by the last poll."""
        return [_completed(*each) for each in abi.COMPLETION.iter_unpack(self._view[: num * abi.COMPLETION.size])]


def _completed(work_id: int, status: int) -> WorkCompletion:
    if status == 0:
        return WorkCompletion(work_id, "", False, False)
    fault = abi.STATUS[status] if 0 < status < len(abi.STATUS) else f"status {status}"
    return WorkCompletion(work_id, fault, fault == "WR_FLUSH_ERR", fault in _ACCESS_FAULTS)
