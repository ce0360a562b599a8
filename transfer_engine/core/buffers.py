"""Local memory that transfers read from and write to, and copies between it and a mapped segment.

Owns the address, the guard against use after ``unregister``, and the choice of the instruction.

memmove is nearly always right. A long one releases the GIL, so that several callers copy at once; a short one keeps it:
it takes some microseconds, and getting the GIL back from other callers takes longer (8 callers of 64 KiB were half as
fast together as one alone). glibc uses ``rep movsb`` for middle lengths, though, and that is several times slower on
AMD's processors when the destination lies 1 to 31 bytes behind the source modulo the page size. This is common: chunks
start on page boundaries, and large numpy arrays and bytearrays at a page boundary plus 16. Measured (EPYC, glibc 2.36,
destination 16 behind): 64 KiB 23 us instead of 4, 256 KiB 145 us instead of 12. A vector loop of numpy (``np.positive``
copies unsigned bytes, also without the GIL) is unaffected: 5 us and 16 us.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, Protocol

import numpy as np

from tanghulu.errors import InvalidRequest

#: Characters of a buffer format (PEP 3118): references and pointers; and lookalikes, names and complex numbers.
_POINTER, _NO_POINTERS = re.compile(r"[O&PzZX]"), re.compile(r":[^:]*:|Z[fdg]")


class Buffer:
    """One C-contiguous piece of the caller's memory, not copied.

    Registering it once spares every transfer the look-up of its address (and, on transports with registered memory, the
    registration). This object keeps the underlying one alive and, for a bytearray, unresizable. A torch tensor in main
    memory is used in place; one on a GPU goes through ``gpu.staging``.
    """

    __slots__ = ("address", "array", "memory", "read_only", "regions", "registered", "size_bytes")

    def __init__(self, source: Any) -> None:
        self.array: Bytes = bytes_of(source)
        #: All of it, of format ``B``.
        self.memory: memoryview = self.array.data
        self.size_bytes: int = self.array.size
        self.address: int = self.array.__array_interface__["data"][0]
        self.read_only: bool = not self.array.flags.writeable
        self.registered = True
        #: State kept for it by transports with registered memory, by device; ends with this object.
        self.regions: dict[object, object] = {}

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``[offset, offset + length)`` as memory of format ``B``."""
        return self.memory[offset : offset + length]

    def unregister(self) -> None:
        """Bar further transfers from this buffer. Those in flight continue, and hold the memory until they end."""
        self.registered = False

    def __repr__(self) -> str:
        access = "read-only " if self.read_only else ""
        return f"Buffer({access}{self.size_bytes} bytes at {self.address:#x}{'' if self.registered else ', gone'})"


def bytes_of(source: Any) -> Bytes:
    """Return the memory of a buffer, a numpy array or a torch tensor in place: flat, of uint8, without a copy.

    Raises InvalidRequest for memory that is empty, not C-contiguous, or on a device, and for content not given by its
    bytes alone: references and pointers, masks, a tensor's pending conjugation.
    """
    try:
        if hasattr(source, "data_ptr"):
            array = _of_tensor(source)
        elif isinstance(source, np.ndarray):
            array = _of_array(source)
        else:
            array = _of_buffer(source)
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
        raise InvalidRequest(f"{type(source).__name__} is not a C-contiguous buffer of bytes: {error}") from None
    if not array.size:
        raise InvalidRequest(f"{type(source).__name__} is empty; a buffer has at least one byte")
    return array


def _of_array(source: np.ndarray[Any, Any]) -> Bytes:
    if isinstance(source, np.ma.MaskedArray):
        raise TypeError("its mask would be lost; use .filled()")
    if source.dtype.hasobject:
        raise TypeError(f"{source.dtype} holds references to objects; convert it first")
    if not source.flags.c_contiguous:
        raise ValueError("copy it with numpy.ascontiguousarray")
    return np.asarray(source).reshape(-1).view(np.uint8)


def _of_buffer(source: Any) -> Bytes:
    if isinstance(source, str):
        raise TypeError("encode it with .encode()")
    view = memoryview(source)
    if _POINTER.search(_NO_POINTERS.sub("", view.format)):
        raise TypeError(f"its format {view.format!r} holds pointers")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _of_tensor(source: Any) -> Bytes:
    """Return the memory of a torch tensor, recognised by its methods: torch is not imported for it."""
    if source.device.type != "cpu":
        raise TypeError(
            f"it lies on {source.device}; move it with .cpu(), or by gpu.staging.GpuStaging(engine).transfer"
        )
    if str(source.layout) != "torch.strided" or source.is_nested or source.is_quantized:
        raise TypeError(f"a {source.dtype} tensor of layout {source.layout} has no plain bytes; make it dense first")
    if source.is_conj() or source.is_neg():
        raise TypeError("it is a view that conjugates or negates; use .resolve_conj() or .resolve_neg()")
    if not source.is_contiguous():
        raise ValueError(f"shape {tuple(source.shape)}, strides {source.stride()}; use .contiguous()")
    if not source.nbytes:
        return np.empty(0, np.uint8)
    if not source.data_ptr():
        raise ValueError("it has no memory")
    memory = (ctypes.c_uint8 * source.nbytes).from_address(source.data_ptr())
    memory.owner = source  # keeps the tensor while the array is in use
    return np.frombuffer(memory, dtype=np.uint8)


Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PAGE_BYTES = 4096
_SLOW_DISTANCES = 32
_SLOW_FROM_BYTES, _SLOW_TO_BYTES = 4 << 10, 512 << 10
#: Longest copy that keeps the GIL.
_SHORT_BYTES = 128 << 10
_memmove = ctypes.memmove
_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_with_gil.restype = None


class Memory(Protocol):
    """Bytes with their address, because requesting it from numpy costs more than a small copy."""

    array: Bytes
    address: int


def copy(to: Memory, to_offset: int, source: Memory, source_offset: int, length: int) -> None:
    """Copy ``length`` bytes; the caller has checked the ranges."""
    to_address, from_address = to.address + to_offset, source.address + source_offset
    distance = (to_address - from_address) % _PAGE_BYTES
    if 0 < distance < _SLOW_DISTANCES and _SLOW_FROM_BYTES <= length < _SLOW_TO_BYTES:
        into = to.array[to_offset : to_offset + length]
        np.positive(source.array[source_offset : source_offset + length], out=into)
    elif length <= _SHORT_BYTES:
        _memmove_with_gil(to_address, from_address, length)
    else:
        _memmove(to_address, from_address, length)
