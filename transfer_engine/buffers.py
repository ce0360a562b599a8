"""Local memory that transfers read from and write to.

Owns the address and the guard against use after ``unregister``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tanghulu.errors import InvalidRequest
from tanghulu.transfer_engine.copying import Bytes


class Buffer:
    """One C-contiguous piece of the caller's memory, without copying it.

    Registering it once spares every transfer the look-up of its address (and, on transports with registered memory,
    the registration). This object keeps the underlying one alive and, for a bytearray, unresizable.
    """

    __slots__ = ("address", "array", "read_only", "regions", "registered", "size_bytes")

    def __init__(self, source: Any) -> None:
        try:
            self.array: Bytes = np.frombuffer(source, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidRequest(
                f"{type(source).__name__} is no C-contiguous buffer of at least one byte: {error}"
            ) from None
        self.size_bytes: int = self.array.size
        self.address: int = self.array.__array_interface__["data"][0]
        self.read_only: bool = not self.array.flags.writeable
        self.registered = True
        #: What transports with registered memory keep for it, by device; ends with this object.
        self.regions: dict[object, object] = {}

    def view(self, offset: int, length: int) -> memoryview:
        """``[offset, offset + length)`` as memory of format ``B``."""
        return self.array[offset : offset + length].data

    def unregister(self) -> None:
        """No further transfer may name this buffer. Those in flight go on, and hold the memory until they end."""
        self.registered = False

    def __repr__(self) -> str:
        access = "read-only " if self.read_only else ""
        return f"Buffer({access}{self.size_bytes} bytes at {self.address:#x}{'' if self.registered else ', gone'})"
