"""Transfers of GPU memory through a pinned ring in main memory: for every transport, and every GPU supported by torch.

Owns the ring and the copy streams; ``staging_plan`` decides what is in it when. The one file of the transfer engine
that imports torch, and only when a ring is made or used.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from tanghulu.runtime.clock import SystemClock
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import TransferEngine, TransferRequest
from tanghulu.transfer_engine.gpu.staging_plan import Piece, StagingEvent, StagingPlan

if TYPE_CHECKING:
    import torch

MIB = 1 << 20


#: Pieces from this size on are copied one by one; smaller ones first gathered on their device, as the start of a copy
#: takes as long as the link needs for some 100 KB.
LEAST_PIECE_BYTES = 256 << 10


class DeviceBlocks:
    """Blocks as parts on devices: ``parts[p]`` uint8 [blocks, part bytes], at ``bounds[p]`` of a block's bytes."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = parts
        self.bounds = list(pairwise(accumulate((part.shape[1] for part in parts), initial=0)))
        self.block_bytes = self.bounds[-1][1]
        self.devices = list(dict.fromkeys(part.device for part in parts))

    @cached_property
    def arrays(self) -> list[Any]:
        """The parts as arrays, if they are in main memory."""
        return [part.numpy() for part in self.parts]


class DeviceCopier(ABC):
    """Copies between devices' memory and the ring; a copy continues after the call that starts it.

    ``staged`` is uint8 [n, block_bytes] in the ring; its row i has the parts of block ``block_ids[i]`` side by side.
    """

    @abstractmethod
    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy."""

    @abstractmethod
    def wait(self, half: int) -> None:
        """Wait until the half's copies have ended."""

    def gather(self, half: int, staged: torch.Tensor, blocks: DeviceBlocks, block_ids: Sequence[int]) -> None:
        """Start copying blocks to ``staged``."""
        for block, row in zip(block_ids, staged, strict=True):
            for (start, end), part in zip(blocks.bounds, blocks.parts, strict=True):
                self.copy(half, row[start:end], part[block])

    def scatter(self, half: int, blocks: DeviceBlocks, block_ids: Sequence[int], staged: torch.Tensor) -> None:
        """Start copying ``staged`` to blocks."""
        for block, row in zip(block_ids, staged, strict=True):
            for (start, end), part in zip(blocks.bounds, blocks.parts, strict=True):
                self.copy(half, part[block], row[start:end])


class HostCopier(DeviceCopier):
    """Copies tensors in main memory, synchronously; blocks by numpy, which starts a copy faster than torch does."""

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        to.copy_(source)

    def wait(self, half: int) -> None:
        """Return at once: nothing is under way."""

    def gather(self, half: int, staged: torch.Tensor, blocks: DeviceBlocks, block_ids: Sequence[int]) -> None:
        for row, block in zip(staged.numpy(), block_ids, strict=True):
            for (start, end), part in zip(blocks.bounds, blocks.arrays, strict=True):
                row[start:end] = part[block]

    def scatter(self, half: int, blocks: DeviceBlocks, block_ids: Sequence[int], staged: torch.Tensor) -> None:
        for row, block in zip(staged.numpy(), block_ids, strict=True):
            for (start, end), part in zip(blocks.bounds, blocks.arrays, strict=True):
                part[block] = row[start:end]


class CudaCopier(DeviceCopier):
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
        with self._stream(half, to.device if to.is_cuda else source.device):
            to.copy_(source, non_blocking=True)

    def gather(self, half: int, staged: torch.Tensor, blocks: DeviceBlocks, block_ids: Sequence[int]) -> None:
        """Start copying blocks to ``staged``; small pieces are put together on the device."""
        import torch

        if self._one_by_one(blocks):
            super().gather(half, staged, blocks, block_ids)
            return
        with self._stream(half, blocks.devices[0]):
            index, whole = _on_device(block_ids, staged, blocks.devices[0])
            for (start, end), part in zip(blocks.bounds, blocks.parts, strict=True):
                torch.index_select(part, 0, index, out=whole[:, start:end])
            staged.copy_(whole, non_blocking=True)

    def scatter(self, half: int, blocks: DeviceBlocks, block_ids: Sequence[int], staged: torch.Tensor) -> None:
        """Start copying ``staged`` to blocks; small pieces are taken apart on the device."""
        if self._one_by_one(blocks):
            super().scatter(half, blocks, block_ids, staged)
            return
        with self._stream(half, blocks.devices[0]):
            index, whole = _on_device(block_ids, staged, blocks.devices[0])
            whole.copy_(staged, non_blocking=True)
            for (start, end), part in zip(blocks.bounds, blocks.parts, strict=True):
                part.index_copy_(0, index, whole[:, start:end])

    def _one_by_one(self, blocks: DeviceBlocks) -> bool:
        return len(blocks.devices) > 1 or blocks.parts[0].shape[1] >= LEAST_PIECE_BYTES

    @contextmanager
    def _stream(self, half: int, device: torch.device) -> Iterator[None]:
        """Run operations on the half's stream, behind those of the caller's stream unless all is settled."""
        import torch

        stream = self._streams[half][device]
        if not self._settled:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def wait(self, half: int) -> None:
        """Wait until the half's streams are empty."""
        for stream in self._streams[half].values():
            stream.synchronize()


def _on_device(
    block_ids: Sequence[int], staged: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of blocks on ``device``, and memory there like ``staged``.

    Both belong to the current stream, whose later copies alone reuse them.
    """
    import torch

    index = torch.tensor(block_ids).pin_memory().to(device, non_blocking=True)
    return index, torch.empty(staged.shape, dtype=torch.uint8, device=device)


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
        self.copier = copier or make_copier(device)

    def staged(self, piece: Piece) -> torch.Tensor:
        """Return the piece's bytes in the ring, as a tensor."""
        return self.memory[piece.ring_offset : piece.ring_offset + piece.length]

    def rows(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the bytes of adjacent pieces of one length, uint8 [pieces, length]."""
        first, length = pieces[0].ring_offset, pieces[0].length
        return self.memory[first : first + len(pieces) * length].view(len(pieces), length)

    def view(self, piece: Piece) -> memoryview:
        """Return the piece's bytes in the ring as a memoryview."""
        return self._view[piece.ring_offset : piece.ring_offset + piece.length]

    def run(
        self,
        lengths: Sequence[int],
        half_bytes: int,
        copy: Callable[[StagingEvent, int, Sequence[Piece]], None],
        move: Callable[[Sequence[Piece]], None],
        *,
        fills: bool,
    ) -> None:
        """Pass requests of these ``lengths`` through, ``half_bytes`` of a half at a time.

        ``copy`` starts the device's copies for a FILL or DRAIN of a half's pieces, ``move`` does the rest of the way;
        the copies into the ring have ended when it is called, and those out of it when this returns or raises.
        """
        assert half_bytes <= self.half_bytes
        try:
            for event, half, pieces in StagingPlan(lengths, half_bytes, fills=fills).steps():
                if event in (StagingEvent.FREE, StagingEvent.MOVE):
                    self.copier.wait(half)
                    if event is StagingEvent.MOVE:
                        move(pieces)
                else:
                    copy(event, half, pieces)
        finally:
            for half in range(2):  # no copy may still run when the next caller comes
                self.copier.wait(half)


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
                lambda event, half, pieces: self._copy(event, half, pieces, requests, tensors),
                lambda pieces: self._move(requests, pieces, until_s),
                fills=any(request.opcode is Opcode.WRITE for request in requests),
            )
        finally:
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
        for piece in pieces:
            if requests[piece.request_index].opcode is wanted:
                there = tensors[piece.request_index][piece.offset : piece.offset + piece.length]
                staged = self._ring.staged(piece)
                to, source = (staged, there) if wanted is Opcode.WRITE else (there, staged)
                self._ring.copier.copy(half, to, source)

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
