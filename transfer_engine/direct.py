"""Short cuts for the smallest batches: one copy through the mapping, or one slice on one stream.

They use the same buffers, paths and links as every batch, but no run and no handle: with one slice and one attempt
there is nothing to decide but the path. Whatever does not go well at once is left to the long way, which tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tanghulu.clock import Clock
from tanghulu.errors import DeadlineExceeded, NodeUnavailable
from tanghulu.transfer_engine.paths import Path, PathTable
from tanghulu.transfer_engine.requests import TransferRequest, admit_buffer, refuse_overlaps
from tanghulu.transfer_engine.shm import ShmPeer
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.tcp import TcpLink
from tanghulu.transfer_engine.transport import Arrived, Completion, Link, Refused


def copy_directly(requests: Sequence[TransferRequest], max_bytes: int, clock: Clock, lock: threading.Lock) -> bool:
    """Copy a batch that needs nothing but mapped memory; False when it needs more, or an owner is gone.

    ``lock`` guards the paths' figures. Raises InvalidRequest, before anything was copied, as ``submit`` does.
    """
    mapped: list[ShmPeer] = []
    num_bytes = 0
    for request in requests:
        shm = request.target.shm
        num_bytes += request.length
        if shm is None or num_bytes > max_bytes or not request.plain:
            return False
        mapped.append(shm)
    buffers = [admit_buffer(request) for request in requests]
    refuse_overlaps(requests, buffers)
    start_s = clock.now_s()
    try:
        for request, buffer, shm in zip(requests, buffers, mapped, strict=True):
            shm.copy(request.opcode, buffer, request.source_offset, request.target_offset, request.length)
    except NodeUnavailable:
        return False
    if not all(shm.alive for shm in (mapped if len(mapped) == 1 else set(mapped))):
        return False
    took_s = clock.now_s() - start_s
    with lock:
        for request in requests:
            paths = request.target.paths
            paths.succeeded(paths.paths[0], request.length, took_s)
    return True


def send_directly(
    request: TransferRequest, deadline_s: float, patience_s: float, clock: Clock, lock: threading.Lock
) -> bool:
    """Move one slice over one stream, once, in this thread; False if that did not work within ``patience_s``.

    On False nothing of it will land any more, and the path's health knows; ``lock`` guards that. Raises InvalidRequest,
    DeadlineExceeded, and what the peer refuses with.
    """
    buffer = admit_buffer(request)
    target, paths = request.target, request.target.paths
    if target.closed:
        return False
    now_s = clock.now_s()
    with lock:
        path = paths.choose_idle(now_s, request.length)
        paths.begun(path, request.length)
    link: Link | None = None
    ended: Completion | None = None
    try:
        link = target.borrow(path.transport, None)
        if link is None:
            return False
        piece = Slice(
            1, 0, request.opcode, buffer, request.source_offset, request.target_offset, request.length, request.lease_id
        )
        ended = _exchange(link, path, piece, min(deadline_s, patience_s), now_s, clock)
    except NodeUnavailable:  # closed just now
        return False
    finally:
        if link is not None:
            if not isinstance(ended, Arrived | Refused):
                link.cut(path)
            target.give_back(path.transport, link)
        with lock:
            paths.ended(path, request.length)
            if isinstance(ended, Arrived):
                paths.succeeded(path, request.length, clock.now_s() - now_s)
    if isinstance(ended, Arrived):
        return True
    return _failed(ended, paths, path, now_s + deadline_s, clock, lock)


def _exchange(link: Link, path: Path, piece: Slice, timeout_s: float, now_s: float, clock: Clock) -> Completion | None:
    """Post and wait; None when the time is up."""
    if isinstance(link, TcpLink):
        ended = link.exchange(piece, path, timeout_s)
    else:
        link.post(piece, path)
        ended = link.poll(timeout_s)
    while not ended and (left_s := now_s + timeout_s - clock.now_s()) > 0:
        ended = link.poll(left_s)
    return ended[0] if ended else None


def _failed(
    ended: Completion | None, paths: PathTable, path: Path, until_s: float, clock: Clock, lock: threading.Lock
) -> bool:
    """Tell the path's health; False: try the long way. Raises what the peer refused with, or DeadlineExceeded."""
    with lock:
        if isinstance(ended, Refused):
            paths.succeeded(path)
        else:
            paths.failed(path, clock.now_s())
    if isinstance(ended, Refused):
        raise ended.error
    if clock.now_s() >= until_s:
        raise DeadlineExceeded("not complete within its deadline; what had arrived is not reported")
    return False
