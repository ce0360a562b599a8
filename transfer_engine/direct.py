"""Short cuts for the smallest batches: one copy through the mapping, or one slice on one stream.

They use the same buffers, paths and links as every batch, but no run and no handle: with one slice and one attempt
there is nothing to decide but the path. Whatever does not go well at once is left to the long way, which tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tanghulu.clock import Clock
from tanghulu.errors import DeadlineExceeded, NodeUnavailable
from tanghulu.transfer_engine.buffers import Buffer
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.requests import TransferRequest, admit_buffer, refuse_overlaps
from tanghulu.transfer_engine.shm import ShmPeer
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.transport import Arrived, Link, Refused


def copy_directly(requests: Sequence[TransferRequest], max_bytes: int) -> bool:
    """Copy a batch that needs nothing but mapped memory; False when it needs more, or an owner is gone.

    Raises InvalidRequest, before anything was copied, as ``submit`` does.
    """
    mapped: list[ShmPeer] = []
    num_bytes = 0
    for request in requests:
        shm = request.target.shm
        num_bytes += request.length
        if shm is None or num_bytes > max_bytes:
            return False
        mapped.append(shm)
    buffers = [admit_buffer(request) for request in requests]
    refuse_overlaps(requests, buffers)
    for request, buffer, shm in zip(requests, buffers, mapped, strict=True):
        shm.copy(request.opcode, buffer, request.source_offset, request.target_offset, request.length)
    return all(shm.alive for shm in (mapped if len(mapped) == 1 else set(mapped)))


def send_directly(
    request: TransferRequest, deadline_s: float, patience_s: float, clock: Clock, lock: threading.Lock
) -> bool:
    """Move one slice over one stream, once, in this thread; False if that did not work within ``patience_s``.

    On False nothing of it will land any more, and the path's health knows; ``lock`` guards that. Raises InvalidRequest,
    DeadlineExceeded, and what the peer refuses with.
    """
    buffer = admit_buffer(request)
    target = request.target
    now_s = clock.now_s()
    with lock:
        path = target.paths.choose(now_s, (), _nothing_in_flight)
    if path is None or target.closed:
        return False
    try:
        link = target.borrow(path.transport, None)
    except NodeUnavailable:  # closed just now
        return False
    if link is None:
        return False
    try:
        ended = _exchange(link, path, _one_slice(request, buffer), now_s + min(deadline_s, patience_s), clock)
    finally:
        target.give_back(path.transport, link)
    if ended is None and clock.now_s() >= now_s + deadline_s:
        raise DeadlineExceeded(f"not complete within {deadline_s:g} s; what had arrived is not reported")
    return _told(ended, request, path, clock, lock)


def _exchange(link: Link, path: Path, piece: Slice, until_s: float, clock: Clock) -> Arrived | Refused | None:
    """Post and wait; None when the path broke or ``until_s`` came, and then the connection is closed."""
    settled = False
    try:
        link.post(piece, path)
        left_s = until_s - clock.now_s()
        while left_s > 0:
            for each in link.poll(left_s):
                if isinstance(each, Arrived | Refused):
                    settled = True
                    return each
                return None
            left_s = until_s - clock.now_s()
        return None
    finally:
        if not settled:
            link.cut(path)


def _told(
    ended: Arrived | Refused | None, request: TransferRequest, path: Path, clock: Clock, lock: threading.Lock
) -> bool:
    paths = request.target.paths
    with lock:
        if ended is None:
            paths.failed(path, clock.now_s())
            return False
        paths.succeeded(path, request.length if isinstance(ended, Arrived) else 0)
    if isinstance(ended, Refused):
        raise ended.error
    return True


def _one_slice(request: TransferRequest, buffer: Buffer) -> Slice:
    return Slice(
        1, 0, request.opcode, buffer, request.source_offset, request.target_offset, request.length, request.lease_id
    )


def _nothing_in_flight(path: Path) -> int:
    return 0
