"""TransferEngine: the front of the transfer engine.

Owns which segments are open and which threads drive asyncio callers' batches; opening picks the transport. Decisions
about slices are ``transfer_run``'s and ``paths``'s, progress is ``handle``'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError, VersionMismatch
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.transfer_engine.client.batch_state import RunLimits, TransferRun
from tanghulu.transfer_engine.client.fast_path import copy_directly, send_directly
from tanghulu.transfer_engine.client.handle import TransferHandle, Workshop
from tanghulu.transfer_engine.client.remote import RemoteSegment
from tanghulu.transfer_engine.client.requests import (
    BatchResult,
    RequestState,
    TransferBatch,
    TransferCancelled,
    TransferRequest,
    admit,
    admit_buffer,
    admit_deadline,
    admit_descriptor,
    refuse_overlaps,
)
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import EngineConfig, TransportLimits
from tanghulu.transfer_engine.core.opcode import Opcode
from tanghulu.transfer_engine.core.segment import SegmentDescriptor
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.shm.long_copy import CopyHelper
from tanghulu.transfer_engine.transports.shm.transport import ShmPeer
from tanghulu.transfer_engine.transports.ucx import agent as ucx_agent

__all__ = [
    "BatchResult",
    "Buffer",
    "EngineConfig",
    "Opcode",
    "RemoteSegment",
    "RequestState",
    "TransferBatch",
    "TransferCancelled",
    "TransferEngine",
    "TransferHandle",
    "TransferRequest",
    "TransportLimits",
]

TRANSPORTS = ("shm", "rdma", "ucx", "tcp")
_Key = tuple[SegmentDescriptor, int, str | None]


class _Opening:
    """One segment in the cache; the lock makes its openers wait for one another and for nobody else."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.remote: RemoteSegment | None = None

    @property
    def stale(self) -> bool:
        """Whether nobody has it open and nobody is opening it."""
        return not self.lock.locked() and (self.remote is None or self.remote.closed)


class TransferEngine:
    """Moves bytes between this process's buffers and other processes' segments; one per process is enough.

    ``transports`` in the order of preference; by default all that ``config`` has limits for.
    ``host_id`` is equal for processes that can share memory.
    Every method may be called from any thread. Use as a context manager, or call ``close()``.
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
            transports = [name for name in TRANSPORTS if name in self.config.limits]
        unknown = [name for name in transports if name not in TRANSPORTS or name not in self.config.limits]
        if unknown or not transports:
            raise ConfigError(f"transports {list(transports)}: choose from {list(TRANSPORTS)}, each with limits")
        self.transports = tuple(transports)
        self.host_id = host_id
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._segments: dict[_Key, _Opening] = {}
        self._rdma: LocalDevices | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._num_async = 0
        self._closed = False
        self._workshop = Workshop(self._clock, threading.Lock(), self._executor)
        self._helper = CopyHelper(wanted=self.config.copy_helper)
        self._slice_bytes = {name: limits.slice_bytes for name, limits in self.config.limits.items()}
        self._run_limits = RunLimits(self.config.limits, self.config.retries_max, self.config.slice_deadline_s)

    # --- memory and segments

    def register(self, buffer: Any) -> Buffer:
        """Name local memory once, for many transfers; see Buffer. Raises InvalidRequest if it is not C-contiguous."""
        return Buffer(buffer)

    def open_segment(
        self, descriptor: SegmentDescriptor, session_id: int = 0, transport: str | None = None
    ) -> RemoteSegment:
        """Reach a peer's segment; the same object for the same arguments while it is open.

        Takes shm when the peer is on this host and its door lets us in, else rdma or ucx where both have it, else tcp;
        ``transport`` pins one.
        ``session_id`` is the one that the owner opened for us (0 where it keeps no leases).
        Waits for the peer, at most ``connect_timeout_s`` per attempt. Raises NodeUnavailable, saying why for each
        transport (VersionMismatch if one of them failed for that), InvalidRequest for an unknown ``transport``.
        """
        if transport is not None and transport not in self.transports:
            raise InvalidRequest(f"transport {transport!r} is not one of this engine's {list(self.transports)}")
        admit_descriptor(descriptor, session_id)
        key = (descriptor, session_id, transport)
        with self._lock:
            if self._closed:
                raise InvalidRequest("the transfer engine is closed")
            opening = self._segments.setdefault(key, _Opening())
        with opening.lock:
            if opening.remote is None or opening.remote.closed:
                opening.remote = self._open(descriptor, session_id, transport)
                self._remember(key, opening, opening.remote)
            return opening.remote

    def open_segments(self) -> list[RemoteSegment]:
        """The segments that are open now, for those who look at their paths."""
        with self._lock:
            remotes = [opening.remote for opening in self._segments.values()]
        return [remote for remote in remotes if remote is not None and not remote.closed]

    async def open_segment_async(
        self, descriptor: SegmentDescriptor, session_id: int = 0, transport: str | None = None
    ) -> RemoteSegment:
        """``open_segment`` in one of the engine's threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor(), self.open_segment, descriptor, session_id, transport)

    # --- transfers

    def submit(self, batch: TransferBatch) -> TransferHandle:
        """Start a batch. Without waiting, as much is posted as the windows take; the rest moves while somebody waits.

        Raises InvalidRequest, and moves nothing, if one request is malformed or two READs overlap locally.
        """
        handle = self._prepare(batch.requests)
        handle.start()
        return handle

    def _prepare(self, requests: Sequence[TransferRequest]) -> TransferHandle:
        if len(requests) > self.config.max_requests_per_batch:
            raise InvalidRequest(
                f"{len(requests)} requests in a batch; at most {self.config.max_requests_per_batch} are allowed"
            )
        buffers = [admit_buffer(request) for request in requests]
        refuse_overlaps(requests, buffers)
        admitted = [admit(request, buffer) for request, buffer in zip(requests, buffers, strict=True)]
        return TransferHandle(self._workshop, TransferRun(admitted, self._run_limits), requests)

    def transfer(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        """Move everything, in this thread; returns when all bytes have arrived, raises the first error otherwise."""
        admit_deadline(deadline_s)
        start_s = self._clock.now_s()
        if copy_directly(requests, self.config.direct_bytes, self._workshop, self._helper):
            return
        if len(requests) == 1 and self._sent_directly(requests[0], start_s, deadline_s):
            return
        left_s = deadline_s - (self._clock.now_s() - start_s)
        self._prepare(requests).wait(max(0.0, left_s)).raise_first()

    async def transfer_async(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        """The same for asyncio; small copies over shm happen at once, all else in one of the engine's threads.

        Raises Overloaded if ``max_async_batches`` are waiting already.
        """
        admit_deadline(deadline_s)
        if copy_directly(requests, self.config.direct_async_bytes, self._workshop, self._helper):
            return
        if self._num_async >= self.config.max_async_batches:
            raise Overloaded(f"{self._num_async} batches are waiting for the engine's threads")
        self._num_async += 1
        try:
            result = await self._prepare(requests).wait_async(deadline_s)
        finally:
            self._num_async -= 1
        result.raise_first()

    # --- life

    def close(self) -> None:
        """Close every segment and end the threads; batches in flight fail."""
        with self._lock:
            self._closed = True
            openings = list(self._segments.values())
            self._segments.clear()
            threads, self._threads = self._threads, None
            rdma, self._rdma = self._rdma, None
        for opening in openings:
            with opening.lock:
                if opening.remote is not None:
                    opening.remote.close()
        self._helper.close()
        if threads is not None:
            threads.shutdown(wait=True)
        if rdma is not None:
            rdma.let_go()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self) -> None:
        """Assert the invariants of everything that is open."""
        with self._lock:
            remotes = [opening.remote for opening in self._segments.values() if opening.remote is not None]
        with self._workshop.lock:
            for remote in remotes:
                remote.check()

    def __repr__(self) -> str:
        return f"TransferEngine({'+'.join(self.transports)}, host_id={self.host_id!r}, {len(self._segments)} segments)"

    # --- inside

    def _remember(self, key: _Key, opening: _Opening, remote: RemoteSegment) -> None:
        """Keep what was opened, and forget what failed to open or was closed since."""
        with self._lock:
            if self._closed:
                remote.close()
                raise InvalidRequest("the transfer engine was closed meanwhile")
            for stale in [each for each, other in self._segments.items() if other.stale]:
                del self._segments[stale]
            self._segments[key] = opening

    def _sent_directly(self, request: TransferRequest, now_s: float, deadline_s: float) -> bool:
        """Whether it has arrived as one slice on a transport that moves bytes by itself; not if it needs more."""
        target = request.target
        if target.shm is not None or not request.plain or type(request.length) is not int:
            return False
        if request.length > self._slice_bytes[target.transport]:
            return False
        return send_directly(request, now_s, deadline_s, self.config.slice_deadline_s, self._workshop)

    def _open(self, descriptor: SegmentDescriptor, session_id: int, pinned: str | None) -> RemoteSegment:
        wanted = (pinned,) if pinned is not None else self.transports
        usable: list[str] = []
        reasons: list[TanghuluError] = []
        shm: ShmPeer | None = None
        for name in wanted:
            if not descriptor.endpoints_of(name):
                reasons.append(NodeUnavailable(f"{name}: the descriptor has no such endpoint"))
            elif name == "tcp" or (name == "rdma" and self._find_rdma(reasons) is not None):
                usable.append(name)
            elif name == "rdma":
                continue
            elif name == "ucx":
                reason = ucx_agent.probe()
                usable += [] if reason else [name]
                reasons += [NodeUnavailable(f"ucx: {reason}")] if reason else []
            else:
                shm = self._open_shm(descriptor, session_id, reasons)
                usable += [name] if shm is not None else []
        while usable:
            remote = RemoteSegment(descriptor, session_id, usable, self.config, self._clock, shm, rdma=self._rdma)
            if remote.transport == "shm":
                return remote
            try:
                remote.greet(self.config.connect_timeout_s, self._clock)
                return remote
            except TanghuluError as error:
                remote.close()
                reasons.append(_reason(remote.transport, error))
                usable = usable[1:] if shm is None else []  # closing it hung up at the shm door
        told = "; ".join(each.message for each in reasons)
        of_version = any(isinstance(each, VersionMismatch) for each in reasons)
        raise (VersionMismatch if of_version else NodeUnavailable)(
            f"segment {descriptor.name!r} of generation {descriptor.generation} cannot be opened: {told}"
        )

    def _find_rdma(self, reasons: list[TanghuluError]) -> LocalDevices | None:
        """The devices of this process, looked for until there are some; None when there are none."""
        try:
            with self._lock:
                if self._rdma is None:
                    self._rdma = LocalDevices.find(self.config.rdma_devices)
                return self._rdma
        except NodeUnavailable as error:
            reasons.append(_reason("rdma", error))
            return None

    def _open_shm(self, descriptor: SegmentDescriptor, session_id: int, reasons: list[TanghuluError]) -> ShmPeer | None:
        if descriptor.host_id != self.host_id:
            reasons.append(NodeUnavailable(f"shm: it is on host {descriptor.host_id!r}, we are on {self.host_id!r}"))
            return None
        for endpoint in descriptor.endpoints_of("shm"):
            try:
                return ShmPeer.open(descriptor, endpoint, session_id, self.config.connect_timeout_s)
            except TanghuluError as error:
                reasons.append(_reason("shm", error))
        return None

    def _executor(self) -> Executor:
        with self._lock:
            if self._closed:
                raise InvalidRequest("the transfer engine is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.config.async_threads, thread_name_prefix="tanghulu-transfer")
            return self._threads


def _reason(transport: str, error: TanghuluError) -> TanghuluError:
    kind = VersionMismatch if isinstance(error, VersionMismatch) else NodeUnavailable
    return kind(f"{transport}: {error.message}")
