"""Caches on GPUs shared between the workers of a host: blocks are copied from one to the other, device to device.

A worker describes its cache once (`SharedCache`); a reader opens it once per link and copies blocks under leases of the
holder, which do not keep a late copy from reading reused blocks. So `kv.peer_reader` confirms the leases after the
copies, and zeroes the blocks that it cannot confirm.

Opened memory counts as memory of the reader's own GPU, which reads another GPU's over their link (peer access): no CUDA
context is made on that one, and a copy is one between tensors of one device. The cache is ready when it is described
and an exported block has been computed, so no event is exchanged. CUDA gives every opener the right to write, so a
cache is described only to workers of the cluster.

A tensor-parallel cache is not shared: CUDA does not pass on memory that the worker itself has opened from its ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import structlog
import torch

from tanghulu.errors import TransferFailed
from tanghulu.transfer_engine.gpu.staging import LEAST_PIECE_BYTES, DeviceBlocks
from tanghulu.workers.kv.peer_methods import SharedCache

_log = structlog.get_logger(__name__)


class DeviceIpc(ABC):
    """Memory of a GPU between processes. The only calls specific to CUDA; tests use another."""

    @abstractmethod
    def share(self, memory: torch.Tensor) -> SharedCache:
        """Describe ``memory``, a whole allocation of torch's; to be called once. Raises RuntimeError if refused."""

    @abstractmethod
    def open(self, shared: SharedCache) -> torch.Tensor:
        """Return another process's memory, open until the tensor is dropped; raises TransferFailed if refused."""

    @abstractmethod
    def waited(self) -> AbstractContextManager[None]:
        """Return a context in which copies are started, and at whose end they have ended, also after an error."""


class CudaIpc(DeviceIpc):
    """CUDA's inter-process memory by torch (``_share_cuda_``, as in torch.multiprocessing), for the GPU ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def share(self, memory: torch.Tensor) -> SharedCache:
        assert memory.storage_offset() == 0
        _, handle, _, offset, counter, counter_offset, _, _ = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        num_blocks, block_bytes = memory.shape
        uuid = _uuid(self._device.index)
        return SharedCache(uuid, num_blocks, block_bytes, handle, offset, counter, counter_offset)

    def open(self, shared: SharedCache) -> torch.Tensor:
        self._require_access(shared.device_uuid)
        size = shared.num_blocks * shared.block_bytes
        counter = shared.counter, shared.counter_offset
        own, no_event = self._device.index, (b"", False)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                own, shared.handle, size, shared.offset, *counter, *no_event
            )
        except RuntimeError as error:
            raise TransferFailed(f"CUDA cannot open the memory on GPU {shared.device_uuid}: {error}") from error
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage).view(shared.num_blocks, -1)

    def _require_access(self, uuid: str) -> None:
        """Raise TransferFailed unless the GPU is this one or one whose memory this one reads."""
        own, others = self._device.index, {_uuid(index): index for index in range(torch.cuda.device_count())}
        if uuid not in others:
            raise TransferFailed(f"GPU {uuid} is hidden from this process; see CUDA_VISIBLE_DEVICES")
        if others[uuid] != own and not torch.cuda.can_device_access_peer(own, others[uuid]):
            raise TransferFailed(f"{self._device} cannot read the memory of GPU {uuid}: no peer access between them")

    @contextmanager
    def waited(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class DeviceSharing:
    """The cache ``memory``, uint8 [blocks, block_bytes], for other workers; and theirs, for reads into its blocks."""

    def __init__(self, memory: torch.Tensor, ipc: DeviceIpc) -> None:
        self._memory, self._ipc = memory, ipc
        self.own = ipc.share(memory)

    def open(self, shared: SharedCache) -> torch.Tensor:
        """Return another worker's cache, uint8 [blocks, block_bytes]; raises TransferFailed if it cannot be opened."""
        if shared.block_bytes != self.own.block_bytes:
            raise TransferFailed(f"its blocks have {shared.block_bytes} bytes, this worker's {self.own.block_bytes}")
        return self._ipc.open(shared)

    def copy(self, theirs: torch.Tensor, their_blocks: Sequence[int], own_blocks: Sequence[int]) -> None:
        """Copy blocks to own ones and wait for that; small ones together. Raises TransferFailed."""
        try:
            with self._ipc.waited():
                if self.own.block_bytes >= LEAST_PIECE_BYTES:
                    for there, here in zip(their_blocks, own_blocks, strict=True):
                        self._memory[here].copy_(theirs[there], non_blocking=True)
                else:
                    found = theirs.index_select(0, self._numbers(their_blocks))
                    self._memory.index_copy_(0, self._numbers(own_blocks), found)
        except RuntimeError as error:
            raise TransferFailed(f"{len(own_blocks)} blocks of another worker cannot be copied: {error}") from error

    def wipe(self, own_blocks: Sequence[int]) -> None:
        """Zero blocks that did not arrive whole (see `ports.wipe`)."""
        if own_blocks:
            with self._ipc.waited():
                self._memory.index_fill_(0, self._numbers(own_blocks), 0)

    def _numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, device=self._memory.device)


def make_sharing(blocks: DeviceBlocks) -> DeviceSharing | None:
    """Return the sharing of a worker's cache; None unless it is one part on a GPU whose driver can share it."""
    memory = blocks.parts[0]
    if len(blocks.parts) > 1 or not memory.is_cuda:
        return None
    try:
        return DeviceSharing(memory, CudaIpc(memory.device))
    except RuntimeError as error:
        _log.info("worker.cache_not_shared", error=str(error), instead="pinned memory")
        return None
