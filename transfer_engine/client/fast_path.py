"""Fast path of the smallest batches: one copy through the mapping, or one slice on one stream.

It uses the same buffers, paths and links as every batch, but no BatchState and no handle: with one slice and one
attempt the only decision is the path. Anything that does not succeed at once is left to them and retried.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tanghulu.errors import DeadlineExceeded, NodeUnavailable
from tanghulu.runtime.clock import Clock
from tanghulu.transfer_engine.client.handle import EngineResources
from tanghulu.transfer_engine.client.remote import LinkPool
from tanghulu.transfer_engine.client.requests import TransferRequest, admit_buffer, refuse_overlaps
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.paths import Path, PathTable
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Arrived, Completion, Link, Refused
from tanghulu.transfer_engine.transports.shm.long_copy import LONG_BYTES, CopyHelper
from tanghulu.transfer_engine.transports.shm.transport import ShmPeer
from tanghulu.transfer_engine.transports.tcp.stream import FAST_SLICE_ID
from tanghulu.transfer_engine.transports.tcp.transport import TcpLink

#: Event of a slice moved by an exchange: nothing else was under way on its link.
_STRAIGHT = Arrived(FAST_SLICE_ID)


def copy_fast(
    requests: Sequence[TransferRequest], max_bytes: int, resources: EngineResources, helper: CopyHelper
) -> bool:
    """Copy a batch that needs only mapped memory; return False when it needs more or an owner is gone.

    Raises InvalidRequest before copying anything, as ``submit`` does.
    """
    if len(requests) == 1:
        return _copy_one(requests[0], max_bytes, resources, helper)
    mapped: list[ShmPeer] = []
    for request in requests:
        shm = request.target.shm
        if shm is None or not request.plain:
            return False
        mapped.append(shm)
    buffers = [admit_buffer(request) for request in requests]
    num_bytes = 0
    for request in requests:
        num_bytes += request.length
    if num_bytes > max_bytes:
        return False
    refuse_overlaps(requests, buffers)
    clock = resources.clock
    start_s = clock.now_s()
    if not _copied(requests, buffers, mapped, helper):
        return False
    took_s = clock.now_s() - start_s
    with resources.lock:
        for request in requests:
            paths = request.target.paths
            paths.succeeded(paths.paths[0], request.length, took_s)
    return True


def _copied(
    requests: Sequence[TransferRequest], buffers: Sequence[Buffer], mapped: Sequence[ShmPeer], helper: CopyHelper
) -> bool:
    """Return whether all was copied while the segments' owners lived; if not, the digests' input is void."""
    try:
        for request, buffer, shm in zip(requests, buffers, mapped, strict=True):
            _copy(request, buffer, shm, helper)
        if all(shm.alive for shm in set(mapped)):
            return True
    except NodeUnavailable:
        pass
    _void(requests)
    return False


def _void(requests: Sequence[TransferRequest]) -> None:
    for request in requests:
        if request.digest is not None:
            request.digest.void()


def _copy(request: TransferRequest, buffer: Buffer, shm: ShmPeer, helper: CopyHelper) -> None:
    at, to, length, digest = request.source_offset, request.target_offset, request.length, request.digest
    if digest is None and length < LONG_BYTES:
        shm.copy(request.opcode, buffer, at, to, length)
    else:
        shm.copy_shown(helper, request.opcode, buffer, at, to, length, digest)


def _copy_one(request: TransferRequest, max_bytes: int, resources: EngineResources, helper: CopyHelper) -> bool:
    """Do ``copy_fast`` for one request. A copy of 64 KiB takes 10 us, and the overhead must stay below that."""
    target = request.target
    shm = target.shm
    if shm is None or not request.plain:
        return False
    buffer = admit_buffer(request)
    length = request.length
    if length > max_bytes:
        return False
    clock = resources.clock
    start_s = clock.now_s()
    try:
        _copy(request, buffer, shm, helper)
        alive = shm.alive
    except NodeUnavailable:
        alive = False
    if not alive:
        _void((request,))
        return False
    took_s = clock.now_s() - start_s
    paths = target.paths
    paths.succeeded_soon(paths.paths[0], length, took_s, resources.lock)
    return True


def send_fast(
    request: TransferRequest, now_s: float, deadline_s: float, patience_s: float, resources: EngineResources
) -> bool:
    """Move one slice over one stream, once, in this thread; return False if that failed within ``patience_s``.

    After False, none of its bytes will land any more and the path's health has been updated. Raises InvalidRequest,
    DeadlineExceeded, and the peer's refusal. ``now_s`` is the time of the call.
    """
    buffer = admit_buffer(request)
    target, length, at = request.target, request.length, request.source_offset
    if target.closed:
        return False
    paths, clock, lock = target.paths, resources.clock, resources.lock
    with lock:
        path = paths.choose_idle(now_s, length)
        paths.begun(path, length)
    pool = target.pools[path]
    link: Link | None = None
    ended: Completion | None = None
    memory, timeout_s = buffer.memory[at : at + length], min(deadline_s, patience_s)
    try:
        link = pool.borrow(None)
        # Half the time, because two system calls may each wait that long.
        if type(link) is TcpLink and link.exchange(
            path, request.opcode, memory, request.lease_id, request.target_offset, timeout_s / 2
        ):
            ended = _STRAIGHT
        elif link is not None:
            ended = _go_on(link, path, request, buffer, now_s + timeout_s, clock)
    except NodeUnavailable:  # closed just now
        return False
    finally:
        _let_go(link, pool, path, ended)
        with lock:
            paths.ended(path, length)
            if isinstance(ended, Arrived):
                paths.succeeded(path, length, clock.now_s() - now_s)
    if ended is _STRAIGHT or isinstance(ended, Arrived):
        return True
    return link is not None and _failed(ended, paths, path, now_s + deadline_s, clock, lock)


def _go_on(
    link: Link, path: Path, request: TransferRequest, buffer: Buffer, until_s: float, clock: Clock
) -> Completion | None:
    """Handle a slice that did not arrive at once; return None when the time is up."""
    piece = Slice(
        FAST_SLICE_ID, 0, request.opcode, buffer, request.source_offset, request.target_offset, request.length,
        request.lease_id,
    )  # fmt: skip
    if isinstance(link, TcpLink):
        link.resume(path, piece)
    else:
        link.post(piece, path)
    ended = link.poll(0.0)
    while not ended and (left_s := until_s - clock.now_s()) > 0:
        ended = link.poll(left_s)
    return ended[0] if ended else None


def _let_go(link: Link | None, pool: LinkPool, path: Path, ended: Completion | None) -> None:
    if ended is _STRAIGHT and link is not None:
        pool.give_back(link, idle=True)
    elif link is not None:
        if not isinstance(ended, Arrived | Refused):
            link.cut(path)
        pool.give_back(link)


def _failed(
    ended: Completion | None, paths: PathTable, path: Path, until_s: float, clock: Clock, lock: threading.Lock
) -> bool:
    """Update the path's health; False leaves it to a handle. Raises the peer's refusal, or DeadlineExceeded."""
    with lock:
        if isinstance(ended, Refused):
            paths.succeeded(path)
        else:
            paths.failed(path, clock.now_s())
    if isinstance(ended, Refused):
        raise ended.error
    if clock.now_s() >= until_s:
        raise DeadlineExceeded("not complete within its deadline; any part of it may have arrived")
    return False
