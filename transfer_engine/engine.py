"""TransferEngine: the entry point of the transfer engine.

Owns the set of open segments and the threads that drive asyncio callers' batches; opening picks the transport, from
those in ``transports.registry``. ``client.batch_state`` and ``core.paths`` decide about slices, ``client.handle``
drives them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError, VersionMismatch
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.runtime.fork import keep_for_ever, notify_in_children, refuse_inherited
from tanghulu.transfer_engine.client.batch_state import BatchLimits, BatchState
from tanghulu.transfer_engine.client.fast_path import copy_fast, send_fast
from tanghulu.transfer_engine.client.handle import EngineResources, TransferHandle
from tanghulu.transfer_engine.client.remote import RemoteSegment
from tanghulu.transfer_engine.client.requests import (
    BatchResult,
    TransferBatch,
    TransferCancelled,
    TransferRequest,
    TransferState,
    admit,
    admit_buffer,
    admit_deadline,
    admit_descriptor,
    refuse_overlaps,
)
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import EngineConfig, TransportLimits
from tanghulu.transfer_engine.core.segment import NO_SESSION, SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.core.transport import ConnectContext, SharedResources, TransportPeer
from tanghulu.transfer_engine.transports.registry import TRANSPORTS
from tanghulu.transfer_engine.transports.shm.long_copy import CopyHelper

__all__ = [
    "BatchResult",
    "Buffer",
    "EngineConfig",
    "Opcode",
    "RemoteSegment",
    "TransferBatch",
    "TransferCancelled",
    "TransferEngine",
    "TransferHandle",
    "TransferRequest",
    "TransferState",
    "TransportLimits",
]

_Key = tuple[SegmentDescriptor, SessionKey, str | None]


class _Opening:
    """One segment in the cache; the lock makes its openers wait only for one another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.remote: RemoteSegment | None = None

    @property
    def stale(self) -> bool:
        """Whether it is neither open nor being opened."""
        return not self.lock.locked() and (self.remote is None or self.remote.closed)


class TransferEngine:
    """Moves bytes between this process's buffers and other processes' segments; one per process is enough.

    ``transports`` in the order of preference; by default all in the registry. ``host_id`` is equal for processes that
    can share memory. Every method may be called from any thread. Use as a context manager, or call ``close()``. In a
    forked child opening and moving raise InvalidRequest.
    """

    def __init__(
        self,
        *,
        transports: Sequence[str] | None = None,
        host_id: str,
        clock: Clock | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        if transports is None:
            transports = list(TRANSPORTS)
        unknown = [name for name in (*transports, *self.config.limits) if name not in TRANSPORTS]
        if unknown or not transports:
            raise ConfigError(f"transports {unknown or list(transports)}: choose from {list(TRANSPORTS)}")
        self.transports = tuple(transports)
        self.host_id = host_id
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._segments: dict[_Key, _Opening] = {}
        self._shared = SharedResources()
        self._threads: ThreadPoolExecutor | None = None
        self._num_async = 0
        self._closed = False
        self._pid = os.getpid()
        notify_in_children(self)
        self._resources = EngineResources(self._clock, threading.Lock(), self._executor)
        self._helper = CopyHelper(wanted=self.config.copy_helper)
        limits = {name: self.config.limits.get(name, each.LIMITS) for name, each in TRANSPORTS.items()}
        self._slice_bytes = {name: each.slice_bytes for name, each in limits.items()}
        self._batch_limits = BatchLimits(limits, self.config.retries_max, self.config.slice_deadline_s)

    # --- memory and segments

    def register(self, buffer: Any) -> Buffer:
        """Register local memory once, for many transfers; see Buffer. Raises InvalidRequest if not C-contiguous."""
        return Buffer(buffer)

    def open_segment(
        self, descriptor: SegmentDescriptor, session: SessionKey = NO_SESSION, transport: str | None = None
    ) -> RemoteSegment:
        """Reach a peer's segment; returns the same object for the same arguments while it is open.

        Takes the first of the engine's transports that reaches the peer: shm if it is on this host and admits this
        process, else rdma or ucx if both have it, else tcp. ``transport`` pins one. ``session`` is the one that the
        owner opened for us (NO_SESSION where it keeps no leases). Waits for the peer, at most ``connect_timeout_s`` per
        attempt. Raises NodeUnavailable with the reason for each transport (VersionMismatch if one of them failed for
        that), InvalidRequest for an unknown ``transport``.
        """
        if transport is not None and transport not in self.transports:
            raise InvalidRequest(f"transport {transport!r} is not one of this engine's {list(self.transports)}")
        admit_descriptor(descriptor, session)
        key = (descriptor, session, transport)
        self._refuse_child()
        with self._lock:
            if self._closed:
                raise InvalidRequest("the transfer engine is closed")
            opening = self._segments.setdefault(key, _Opening())
        with opening.lock:
            if opening.remote is None or opening.remote.closed:
                opening.remote = self._open(descriptor, session, transport)
                self._remember(key, opening, opening.remote)
            return opening.remote

    def open_segments(self) -> list[RemoteSegment]:
        """Return the segments open now, to inspect their paths."""
        with self._lock:
            remotes = [opening.remote for opening in self._segments.values()]
        return [remote for remote in remotes if remote is not None and not remote.closed]

    async def open_segment_async(
        self, descriptor: SegmentDescriptor, session: SessionKey = NO_SESSION, transport: str | None = None
    ) -> RemoteSegment:
        """Run ``open_segment`` in one of the engine's threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor(), self.open_segment, descriptor, session, transport)

    # --- transfers

    def submit(self, batch: TransferBatch) -> TransferHandle:
        """Start a batch. Posts, without waiting, what the windows take; the rest moves while a caller waits.

        Raises InvalidRequest, and moves nothing, if one request is malformed or two READs overlap locally.
        """
        handle = self._prepare(batch.requests)
        handle.start()
        return handle

    def _prepare(self, requests: Sequence[TransferRequest]) -> TransferHandle:
        self._refuse_child()
        if len(requests) > self.config.max_requests_per_batch:
            raise InvalidRequest(
                f"{len(requests)} requests in a batch; at most {self.config.max_requests_per_batch} are allowed"
            )
        buffers = [admit_buffer(request) for request in requests]
        refuse_overlaps(requests, buffers)
        admitted = [admit(request, buffer) for request, buffer in zip(requests, buffers, strict=True)]
        return TransferHandle(self._resources, BatchState(admitted, self._batch_limits), requests)

    def transfer(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        """Move everything, in this thread; returns when all bytes have arrived, raises the first error otherwise."""
        admit_deadline(deadline_s)
        self._refuse_child()
        start_s = self._clock.now_s()
        if copy_fast(requests, self.config.fast_copy_bytes, self._resources, self._helper):
            return
        if len(requests) == 1 and self._sent_fast(requests[0], start_s, deadline_s):
            return
        left_s = deadline_s - (self._clock.now_s() - start_s)
        self._prepare(requests).wait(max(0.0, left_s)).raise_first()

    async def transfer_async(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        """Do ``transfer`` for asyncio: small copies over shm at once, all else in one of the engine's threads.

        Raises Overloaded if ``max_async_batches`` are already waiting.
        """
        admit_deadline(deadline_s)
        self._refuse_child()
        if copy_fast(requests, self.config.fast_copy_async_bytes, self._resources, self._helper):
            return
        if self._num_async >= self.config.max_async_batches:
            raise Overloaded(f"{self._num_async} batches are waiting for the engine's threads; try again later")
        self._num_async += 1
        try:
            result = await self._prepare(requests).wait_async(deadline_s)
        finally:
            self._num_async -= 1
        result.raise_first()

    # --- life

    def close(self) -> None:
        """Close every segment and end the threads; batches in flight fail. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            openings = list(self._segments.values())
            self._segments.clear()
            threads, self._threads = self._threads, None
        for opening in openings:
            with opening.lock:
                if opening.remote is not None:
                    opening.remote.close()
        self._helper.close()
        if threads is not None:
            threads.shutdown(wait=True)
        self._shared.close()

    def forget_in_child(self) -> None:
        """Leave everything as it is: links, memory registered with devices and mappings are the parent's."""
        self._closed = True
        keep_for_ever(self)

    def _refuse_child(self) -> None:
        if self._closed:
            refuse_inherited("this transfer engine", self._pid, "make another one in the child")

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self) -> None:
        """Assert the invariants of everything open."""
        with self._lock:
            remotes = [opening.remote for opening in self._segments.values() if opening.remote is not None]
        with self._resources.lock:
            for remote in remotes:
                remote.check()

    def __repr__(self) -> str:
        return f"TransferEngine({'+'.join(self.transports)}, host_id={self.host_id!r}, {len(self._segments)} segments)"

    # --- inside

    def _remember(self, key: _Key, opening: _Opening, remote: RemoteSegment) -> None:
        """Keep the opened segment, and forget those that failed to open or were closed since."""
        with self._lock:
            if self._closed:
                remote.close()
                raise InvalidRequest("the transfer engine was closed while the segment was being opened")
            for stale in [each for each, other in self._segments.items() if other.stale]:
                del self._segments[stale]
            self._segments[key] = opening

    def _sent_fast(self, request: TransferRequest, now_s: float, deadline_s: float) -> bool:
        """Return whether the request was moved as one slice on the fast path; False if it needs more than that."""
        target = request.target
        if target.shm is not None or not request.plain or type(request.length) is not int:
            return False
        if request.length > self._slice_bytes[target.transport]:
            return False
        return send_fast(request, now_s, deadline_s, self.config.slice_deadline_s, self._resources)

    def _open(self, descriptor: SegmentDescriptor, session: SessionKey, pinned: str | None) -> RemoteSegment:
        """Reach the segment over every capable transport; the first whose owner answers is the preferred one."""
        context = ConnectContext(descriptor, session, self.config, self.host_id, shared=self._shared)
        peers: dict[str, TransportPeer] = {}
        reasons: list[TanghuluError] = []
        for name in (pinned,) if pinned is not None else self.transports:
            try:
                if not context.endpoints(name):
                    raise NodeUnavailable(f"the segment is not served over {name}; name another transport")
                peers[name] = TRANSPORTS[name].connect(context)
            except TanghuluError as error:
                reasons.append(_reason(name, error))
        while peers:
            remote = RemoteSegment(context, peers, self._clock)
            try:
                remote.greet(self.config.connect_timeout_s, self._clock)
                return remote
            except TanghuluError as error:
                reasons.append(_reason(remote.transport, error))
                peers.pop(remote.transport).close()
        texts = "; ".join(each.message for each in reasons)
        of_version = any(isinstance(each, VersionMismatch) for each in reasons)
        raise (VersionMismatch if of_version else NodeUnavailable)(
            f"segment {descriptor.name!r} of generation {descriptor.generation} cannot be opened: {texts}"
        )

    def _executor(self) -> Executor:
        self._refuse_child()
        with self._lock:
            if self._closed:
                raise InvalidRequest("the transfer engine is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.config.async_threads, thread_name_prefix="tanghulu-transfer")
            return self._threads


def _reason(transport: str, error: TanghuluError) -> TanghuluError:
    kind = VersionMismatch if isinstance(error, VersionMismatch) else NodeUnavailable
    return kind(f"{transport}: {error.message}")
