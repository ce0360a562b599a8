"""Local memory that transfers read from and write to.

Owns the address and the guard against use after ``unregister``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tanghulu.errors import InvalidRequest
from tanghulu.transfer_engine.core.copying import Bytes


class Buffer:
    """One C-contiguous piece of the caller's memory, without copying it.

    Registering it once spares every transfer the look-up of its address (and, on transports with registered memory,
    the registration). This object keeps the underlying one alive and, for a bytearray, unresizable. A torch tensor in
    main memory is taken as it lies there; one on a GPU goes through ``gpu.staging``.
    """

    __slots__ = ("address", "array", "memory", "read_only", "regions", "registered", "size_bytes")

    def __init__(self, source: Any) -> None:
        try:
            self.array: Bytes = _bytes_of(source)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidRequest(
                f"{type(source).__name__} is no C-contiguous buffer of at least one byte: {error}"
            ) from None
        #: All of it, of format ``B``.
        self.memory: memoryview = self.array.data
        self.size_bytes: int = self.array.size
        self.address: int = self.array.__array_interface__["data"][0]
        self.read_only: bool = not self.array.flags.writeable
        self.registered = True
        #: What transports with registered memory keep for it, by device; ends with this object.
        self.regions: dict[object, object] = {}

    def view(self, offset: int, length: int) -> memoryview:
        """``[offset, offset + length)`` as memory of format ``B``."""
        return self.memory[offset : offset + length]

    def unregister(self) -> None:
        """No further transfer may name this buffer. Those in flight go on, and hold the memory until they end."""
        self.registered = False

    def __repr__(self) -> str:
        access = "read-only " if self.read_only else ""
        return f"Buffer({access}{self.size_bytes} bytes at {self.address:#x}{'' if self.registered else ', gone'})"


def _bytes_of(source: Any) -> Bytes:
    """The memory of a buffer or of a torch tensor (known by its methods: torch is not imported for it)."""
    if not hasattr(source, "data_ptr"):
        return np.frombuffer(source, dtype=np.uint8)
    if source.device.type != "cpu":
        raise TypeError(f"it lies on {source.device}; move it by gpu.staging.GpuStaging(engine).transfer")
    if not source.is_contiguous() or source.nbytes == 0:
        raise ValueError(f"a tensor of shape {tuple(source.shape)} with strides {source.stride()}")
    memory = (ctypes.c_uint8 * source.nbytes).from_address(source.data_ptr())
    memory.owner = source  # keeps the tensor while somebody has the array
    return np.frombuffer(memory, dtype=np.uint8)
