"""Memory named by addresses, as Mooncake's callers name it, as buffers of our client."""

from __future__ import annotations

import array
import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from tanghulu.errors import InvalidRequest
from tanghulu.transfer_engine.core.buffers import Buffer

#: CUDA's name of a pointer's kind of memory, and that of a device's.
_MEMORY_TYPE: Final = 2
_DEVICE: Final = 2


class BufferHandle(array.array):  # type: ignore[type-arg]  # not generic at run time before 3.12
    """A value in memory of its own: a writable buffer of format ``b`` that lives as long as this object."""

    @classmethod
    def of(cls, value: memoryview) -> BufferHandle:
        """Return a copy of ``value``."""
        handle = cls("b")
        handle.frombytes(value)
        return handle

    def ptr(self) -> int:
        """Return the address of the first byte."""
        return self.buffer_info()[0]

    def size(self) -> int:
        """Return the number of bytes."""
        return len(self)


def refuse_device_memory(address: int) -> None:
    """Raise InvalidRequest if CUDA, where this process has loaded it, says that ``address`` is memory of a GPU."""
    cuda, kind = _cuda(), ctypes.c_uint(0)
    if cuda is None or cuda.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_void_p(address)):
        return  # memory that CUDA does not know is the host's
    if kind.value == _DEVICE:
        raise InvalidRequest(
            f"{address:#x} is memory of a GPU; give host memory, or use tanghulu's own connector for the engine"
        )


def _cuda() -> Any:
    """Return CUDA's driver if some package has loaded it; None otherwise."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


class RegisteredMemory:
    """The ranges of memory that a caller has registered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # by the address of the first byte

    def add(self, address: int, size: int) -> None:
        """Register a range; raises InvalidRequest for an empty one, or one that overlaps another."""
        if address <= 0 or size <= 0:
            raise InvalidRequest(f"cannot register {size} bytes at {address:#x}; give a range of at least one byte")
        refuse_device_memory(address)
        with self._lock:
            for begin, length in self._sizes.items():
                if begin < address + size and address < begin + length:
                    raise InvalidRequest(f"{size} bytes at {address:#x} overlap the range registered at {begin:#x}")
            self._sizes[address] = size

    def remove(self, address: int) -> None:
        """Undo ``add``; raises InvalidRequest if no registered range begins at ``address``."""
        with self._lock:
            if self._sizes.pop(address, None) is None:
                raise InvalidRequest(f"no registered range begins at {address:#x}")


def buffer_at(address: int, size: int) -> Buffer:
    """Return ``size`` bytes of this process's memory as a buffer; raises InvalidRequest for none.

    The caller keeps the memory alive until the transfers of the buffer have ended.
    """
    if address <= 0 or size <= 0:
        raise InvalidRequest(f"{size} bytes at {address:#x} are no buffer; give at least one byte")
    refuse_device_memory(address)
    return Buffer((ctypes.c_uint8 * size).from_address(address))


def buffers_at(addresses: Sequence[int], sizes: Sequence[int]) -> list[Buffer]:
    """Return the pieces of one value; raises InvalidRequest for lists of unequal length, or without a piece."""
    if len(addresses) != len(sizes) or not addresses:
        raise InvalidRequest(f"{len(addresses)} addresses and {len(sizes)} sizes; give one size for each address")
    return [buffer_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
