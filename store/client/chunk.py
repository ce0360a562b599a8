"""A chunk as returned by ``get``: readable bytes, possibly the store's own memory."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tanghulu.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


class Chunk:
    """Read-only bytes of one value; a context manager.

    Over shm these are the node's own bytes under a lease, not a copy: ``close()`` returns the lease. ``view``,
    ``numpy()`` and ``torch(shared=True)`` share the memory; while one of them exists, so does the lease, even beyond
    ``close()``. They must not be written to, and a forked child must not read them: mapped memory is not inherited.
    """

    __slots__ = ("_memory", "_on_close", "key", "size_bytes", "version")

    def __init__(
        self, key: str, version: int, memory: Bytes | bytes | memoryview, on_close: Callable[[], None] | None = None
    ) -> None:
        self.key = key
        self.version = version
        self.size_bytes = len(memory)
        self._memory: Bytes | bytes | memoryview | None = memory
        self._on_close = on_close

    @property
    def view(self) -> memoryview:
        """The bytes, of format ``B``. Raises InvalidRequest after ``close()``."""
        return self.numpy().data

    def __len__(self) -> int:
        return self.size_bytes

    def __buffer__(self, flags: int) -> memoryview:
        return self.view

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.numpy()
        return array.copy() if copy else array if dtype is None else array.astype(dtype, copy=bool(copy))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the bytes, without memory or lease."""
        return Chunk, (self.key, self.version, self.bytes())

    def __bytes__(self) -> bytes:
        return self.bytes()

    def bytes(self) -> bytes:
        """Return the bytes as ``bytes``: a copy, unless the value arrived as bytes."""
        memory = self._memory
        return memory if type(memory) is bytes else self.numpy().tobytes()

    def numpy(self) -> Bytes:
        """Return the bytes as a one-dimensional array of uint8, without a copy."""
        memory = self._memory
        if memory is None:
            raise InvalidRequest(f"chunk {self.key!r} is closed; copy its bytes before you close it")
        if not isinstance(memory, np.ndarray):
            self._memory = memory = np.frombuffer(memory, np.uint8)
            memory.flags.writeable = False
        return memory

    def torch(
        self, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None, *, shared: bool = False
    ) -> torch.Tensor:
        """Return a copy of the bytes as a tensor owned by the caller; flat uint8 by default.

        ``shared=True`` avoids the copy: the tensor is the chunk's memory, perhaps the store's own, and must only be
        read. torch has no read-only tensors: an operation in place on it ends the process, or destroys the chunk for
        everybody. To read into an existing tensor, see ``Client.get_into``.
        """
        from tanghulu.store.client import tensors

        tensor = tensors.from_array(self.numpy(), dtype, shape)
        return tensor if shared else tensor.clone()

    def close(self) -> None:
        """Release the bytes. Calling it twice is allowed."""
        if self._memory is None:
            return
        self._memory = None
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, Chunk):
            return bool(self.bytes() == other.bytes())
        return bool(self.bytes() == other) if isinstance(other, bytes | bytearray) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Chunk({self.key!r}, {self.size_bytes} bytes{', closed' if self._memory is None else ''})"
