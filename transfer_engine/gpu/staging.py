"""Transfers of GPU memory through a pinned ring in main memory: for every transport, and every GPU supported by torch.

Owns the ring and the copy streams; ``staging_plan`` decides what is in it when. The one file of the transfer engine
that imports torch, and only when a ring is made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from tanghulu.runtime.clock import SystemClock
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import TransferEngine, TransferRequest
from tanghulu.transfer_engine.gpu.staging_plan import Piece, StagingEvent, StagingPlan

if TYPE_CHECKING:
    import torch

MIB = 1 << 20


class DeviceCopier(Protocol):
    """Copies between a device's memory and the ring; a copy continues after the call that starts it."""

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy."""

    def wait(self, half: int) -> None:
        """Wait until the half's copies have ended."""


Copies = Callable[[StagingEvent, Piece], Iterable[tuple["torch.Tensor", "torch.Tensor"]]]


class HostCopier:
    """Copies tensors in main memory, synchronously."""

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        to.copy_(source)

    def wait(self, half: int) -> None:
        """Return at once: nothing is under way."""


class CudaCopier:
    """Copies tensors on ``devices``, on a stream for each half of the ring and GPU.

    The streams come from torch's high-priority pool: those of the other pool are handed out in turn, and one on which
    CUDA graphs are recorded must never carry a copy. Copies wait for the tensors' producers on the caller's current
    stream, as torch requires; not with ``settled``, for tensors that are no longer computed and whose readers are done.
    """

    def __init__(self, devices: Iterable[torch.device], *, settled: bool = False) -> None:
        import torch

        self._settled = settled
        own = dict.fromkeys(_indexed(device) for device in devices)
        # Made here and not by the first copy, which several threads may start at once.
        self._streams: tuple[dict[torch.device, torch.cuda.Stream], ...] = tuple(
            {device: torch.cuda.Stream(device, priority=-1) for device in own}  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy between pinned memory and a GPU on that GPU's stream of the half."""
        import torch

        device = to.device if to.is_cuda else source.device
        stream = self._streams[half][device]
        if not self._settled:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def wait(self, half: int) -> None:
        """Wait until the half's streams are empty."""
        for stream in self._streams[half].values():
            stream.synchronize()


def _indexed(device: torch.device) -> torch.device:
    """Return ``device`` as its tensors name it: a GPU by its number."""
    import torch

    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def make_copier(*devices: torch.device, settled: bool = False) -> DeviceCopier:
    """Return the copier for tensors on ``devices``, at least one."""
    return HostCopier() if devices[0].type == "cpu" else CudaCopier(devices, settled=settled)


class StagingRing:
    """``ring_bytes`` of pinned memory in two halves, between a device's memory and the segment.

    On ``cpu`` it is not pinned: for tests, and for code that runs with and without a GPU. One caller at a time.
    """

    def __init__(self, device: torch.device, ring_bytes: int, copier: DeviceCopier | None = None) -> None:
        import torch

        if ring_bytes < 2:
            raise InvalidRequest(f"ring_bytes is {ring_bytes}; a staging ring has at least 2")
        self.half_bytes = ring_bytes // 2
        self.memory = torch.empty(2 * self.half_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._view = self.memory.numpy().data
        self._copier = copier or make_copier(device)

    def staged(self, piece: Piece) -> torch.Tensor:
        """Return the piece's bytes in the ring, as a tensor."""
        return self.memory[piece.ring_offset : piece.ring_offset + piece.length]

    def view(self, piece: Piece) -> memoryview:
        """Return the same bytes as a memoryview."""
        return self._view[piece.ring_offset : piece.ring_offset + piece.length]

    def run(
        self,
        lengths: Sequence[int],
        half_bytes: int,
        copies: Copies,
        move: Callable[[Sequence[Piece]], None],
        *,
        fills: bool,
    ) -> None:
        """Pass requests of these ``lengths`` through, ``half_bytes`` of a half at a time.

        ``copies`` names the (to, from) of the device's copies for a FILL or DRAIN of a piece, ``move`` does the rest of
        the way; the copies into the ring have ended when it is called, and those out of it when this returns or raises.
        """
        assert half_bytes <= self.half_bytes
        try:
            for event, half, pieces in StagingPlan(lengths, half_bytes, fills=fills).steps():
                if event in (StagingEvent.FREE, StagingEvent.MOVE):
                    self._copier.wait(half)
                    if event is StagingEvent.MOVE:
                        move(pieces)
                    continue
                for piece in pieces:
                    for to, source in copies(event, piece):
                        self._copier.copy(half, to, source)
        finally:
            for half in range(2):  # no copy may still run when the next caller comes
                self._copier.wait(half)


def pin(memory: memoryview) -> Callable[[], None]:
    """Pin existing memory, such as a segment's, for copies of every GPU; returns the function to unpin it.

    Raises NodeUnavailable with the driver's message.
    """
    import torch
    from torch.cuda import _pin_memory_utils

    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    try:
        _pin_memory_utils.pin_memory(address, tensor.nbytes)
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel's launch, which clears it
            torch.zeros(1, device="cuda")
        raise NodeUnavailable(f"{tensor.nbytes} bytes cannot be pinned: {error}") from error
    return lambda: _pin_memory_utils.unpin_memory(address)


class GpuStaging:
    """A ring of ``ring_bytes`` of pinned memory for tensors on ``device``; its transfers wait for one another.

    On ``cpu`` the ring is not pinned: for tests, and for code that runs with and without a GPU.
    """

    def __init__(self, engine: TransferEngine, device: str | torch.device, *, ring_bytes: int = 64 * MIB) -> None:
        import torch

        self._engine = engine
        self._device = _indexed(torch.device(device))
        self._ring = StagingRing(self._device, ring_bytes)
        self._buffer = engine.register(self._ring.memory)
        self._clock = SystemClock()
        self._lock = threading.Lock()

    def transfer(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        """Do ``TransferEngine.transfer`` for requests whose ``source`` is a contiguous tensor on the device.

        Waits for the computation of a WRITE's tensor on the current stream; a READ's tensor may be used on any stream
        when this returns. ``notify`` and ``verify`` work, ``checksum`` does not (the parts of a long request are never
        together). Raises as ``transfer`` does.
        """
        tensors = [self._bytes(request) for request in requests]
        until_s = self._clock.now_s() + deadline_s
        if not self._lock.acquire(timeout=max(0.0, min(deadline_s, threading.TIMEOUT_MAX))):
            raise DeadlineExceeded(f"the staging ring was in use for {deadline_s:g} s")
        try:
            self._ring.run(
                [request.length for request in requests],
                self._ring.half_bytes,
                lambda event, piece: self._copies(event, piece, requests, tensors),
                lambda pieces: self._move(requests, pieces, until_s),
                fills=any(request.opcode is Opcode.WRITE for request in requests),
            )
        finally:
            self._lock.release()

    # --- inside

    def _copies(
        self, event: StagingEvent, piece: Piece, requests: Sequence[TransferRequest], tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        wanted = Opcode.WRITE if event is StagingEvent.FILL else Opcode.READ
        if requests[piece.request_index].opcode is wanted:
            there = tensors[piece.request_index][piece.offset : piece.offset + piece.length]
            staged = self._ring.staged(piece)
            yield (staged, there) if wanted is Opcode.WRITE else (there, staged)

    def _move(self, requests: Sequence[TransferRequest], pieces: Sequence[Piece], until_s: float) -> None:
        left_s = until_s - self._clock.now_s()
        if left_s <= 0:
            raise DeadlineExceeded("not complete within its deadline; any part of it may have arrived")
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
        """Return the request's part of its tensor, as bytes."""
        import torch

        source: Any = request.source
        if not isinstance(source, torch.Tensor) or source.device != self._device:
            found = f"a tensor on {source.device}" if isinstance(source, torch.Tensor) else type(source).__name__
            raise InvalidRequest(f"this ring stages tensors on {self._device}, not {found}")
        if not source.is_contiguous():
            raise InvalidRequest(
                f"a tensor of shape {tuple(source.shape)} with strides {source.stride()}; use .contiguous()"
            )
        start, length = request.source_offset, request.length
        if length <= 0 or start < 0 or start + length > source.nbytes:
            raise InvalidRequest(f"[{start}, +{length}) is outside the tensor of {source.nbytes} bytes")
        if request.checksum is not None:
            raise InvalidRequest("a staged request cannot have a checksum; set verify")
        return source.detach().view(-1).view(torch.uint8)[start : start + length]
