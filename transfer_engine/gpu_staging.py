"""GPU memory through a pinned ring in main memory: works with every transport, and with every GPU that torch knows.

Owns the ring and the copy streams; what is where when is ``staging_plan``'s decision. The one file of the transfer
engine that imports torch, and only when a ring is made.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tanghulu.clock import SystemClock
from tanghulu.errors import DeadlineExceeded, InvalidRequest
from tanghulu.transfer_engine.engine import TransferEngine, TransferRequest
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.staging_plan import Piece, StagingEvent, StagingPlan

if TYPE_CHECKING:
    import torch

MIB = 1 << 20


class Copier(Protocol):
    """Copies between a device's memory and the ring, behind the caller's back."""

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy."""
        ...

    def wait(self, half: int) -> None:
        """Until the half's copies have ended."""
        ...


class HostCopier:
    """For tensors in main memory: a copy is done at once."""

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        to.copy_(source)

    def wait(self, half: int) -> None:
        """Nothing is under way."""


class CudaCopier:
    """A stream for each half; the tensor's producers on the current stream are waited for, as torch asks."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy on the half's stream, behind what the caller's stream has to do."""
        import torch

        stream = self._streams[half]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def wait(self, half: int) -> None:
        """Until the half's stream is empty."""
        self._streams[half].synchronize()


class GpuStaging:
    """A ring of ``ring_bytes`` of pinned memory for tensors on ``device``; transfers through it wait for one another.

    On ``cpu`` the ring is not pinned: for tests, and for code that runs with and without a GPU.
    """

    def __init__(self, engine: TransferEngine, device: str | torch.device, *, ring_bytes: int = 64 * MIB) -> None:
        import torch

        if ring_bytes < 2:
            raise InvalidRequest(f"a staging ring of {ring_bytes} bytes; it needs two halves")
        self._engine = engine
        self._device = torch.device(device)
        self._half_bytes = ring_bytes // 2
        on_gpu = self._device.type != "cpu"
        self._ring = torch.empty(2 * self._half_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._buffer = engine.register(self._ring)
        self._copier: Copier = CudaCopier(self._device) if on_gpu else HostCopier()
        self._clock = SystemClock()
        self._lock = threading.Lock()

    def transfer(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        """``TransferEngine.transfer`` for requests whose ``source`` is a contiguous tensor on the device.

        What was computed into a WRITE's tensor on the current stream is waited for; a READ's tensor may be used on any
        stream when this returns. ``notify`` and ``verify`` work, ``checksum`` does not (the parts of a long request are
        never together). Raises as ``transfer`` does.
        """
        tensors = [self._bytes(request) for request in requests]
        plan = StagingPlan([request.length for request in requests], self._half_bytes)
        until_s = self._clock.now_s() + deadline_s
        if not self._lock.acquire(timeout=max(0.0, min(deadline_s, threading.TIMEOUT_MAX))):
            raise DeadlineExceeded(f"the staging ring was in use for {deadline_s:g} s")
        try:
            for event, half, pieces in plan.steps():
                if event is StagingEvent.FREE:
                    self._copier.wait(half)
                elif event is StagingEvent.MOVE:
                    self._copier.wait(half)
                    self._move(requests, pieces, until_s)
                else:
                    self._copy(event, half, pieces, requests, tensors)
        finally:
            for half in range(2):  # nothing may be copied behind the back of who comes next
                self._copier.wait(half)
            self._lock.release()

    # --- inside

    def _copy(
        self,
        event: StagingEvent,
        half: int,
        pieces: Sequence[Piece],
        requests: Sequence[TransferRequest],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        wanted = Opcode.WRITE if event is StagingEvent.FILL else Opcode.READ
        for index, offset, ring_offset, length in pieces:
            if requests[index].opcode is wanted:
                there, staged = tensors[index][offset : offset + length], self._ring[ring_offset : ring_offset + length]
                self._copier.copy(half, *((staged, there) if wanted is Opcode.WRITE else (there, staged)))

    def _move(self, requests: Sequence[TransferRequest], pieces: Sequence[Piece], until_s: float) -> None:
        left_s = until_s - self._clock.now_s()
        if left_s <= 0:
            raise DeadlineExceeded("not complete within its deadline; what had arrived is not reported")
        self._engine.transfer([self._part(requests[piece.request_index], piece) for piece in pieces], left_s)

    def _part(self, request: TransferRequest, piece: Piece) -> TransferRequest:
        is_last = piece.offset + piece.length == request.length
        return replace(
            request,
            source=self._buffer,
            source_offset=piece.ring_offset,
            target_offset=request.target_offset + piece.offset,
            length=piece.length,
            notify=request.notify if is_last else None,
        )

    def _bytes(self, request: TransferRequest) -> torch.Tensor:
        """The request's part of its tensor, as bytes."""
        import torch

        source: Any = request.source
        if not isinstance(source, torch.Tensor) or source.device.type != self._device.type:
            raise InvalidRequest(f"this ring stages tensors on {self._device}, not {type(source).__name__}")
        if not source.is_contiguous():
            raise InvalidRequest(f"a tensor of shape {tuple(source.shape)} with strides {source.stride()}")
        start, length = request.source_offset, request.length
        if length <= 0 or start < 0 or start + length > source.nbytes:
            raise InvalidRequest(f"[{start}, +{length}) is outside the tensor of {source.nbytes} bytes")
        if request.checksum is not None:
            raise InvalidRequest("a staged request has no checksum of its whole; let it verify")
        return source.detach().view(-1).view(torch.uint8)[start : start + length]
