"""`DeviceIpc` without a GPU: caches are files in /dev/shm, which any process of the host maps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

import torch

from tanghulu.errors import TransferFailed
from tanghulu.workers.kv.device_sharing import DeviceIpc
from tanghulu.workers.kv.peer_methods import SharedCache


def mapped(path: Path, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """The file's memory, uint8 [num_blocks, block_bytes], made if it is not there."""
    size = num_blocks * block_bytes
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(num_blocks, block_bytes)


class FileIpc(DeviceIpc):
    """Of the memory `mapped` from ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_opened = 0

    def share(self, memory: torch.Tensor) -> SharedCache:
        num_blocks, block_bytes = memory.shape
        return SharedCache("cpu", num_blocks, block_bytes, os.fsencode(self._path), 0, b"", 0)

    def open(self, shared: SharedCache) -> torch.Tensor:
        path = Path(os.fsdecode(shared.handle))
        if not path.exists():
            raise TransferFailed(f"{path} cannot be opened")
        self.num_opened += 1
        return mapped(path, shared.num_blocks, shared.block_bytes)

    @contextmanager
    def waited(self) -> Iterator[None]:
        yield


class LocalIpc(DeviceIpc):
    """Of any memory, between workers of one process."""

    _shared: ClassVar[dict[bytes, torch.Tensor]] = {}

    def share(self, memory: torch.Tensor) -> SharedCache:
        handle = str(memory.data_ptr()).encode()
        self._shared[handle] = memory
        num_blocks, block_bytes = memory.shape
        return SharedCache("cpu", num_blocks, block_bytes, handle, 0, b"", 0)

    def open(self, shared: SharedCache) -> torch.Tensor:
        return self._shared[shared.handle]

    def waited(self) -> AbstractContextManager[None]:
        return nullcontext()
