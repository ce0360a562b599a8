"""Callers' values and buffers as memory of format ``B``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tanghulu.errors import InvalidRequest
from tanghulu.store.client import tensors
from tanghulu.transfer_engine.core.buffers import Buffer

#: Buffers that may make one value.
MAX_PIECES = 4096


def readable(value: Any) -> memoryview:
    """The bytes of ``value`` (bytes-like, numpy array, torch tensor, Buffer), without a copy.

    Raises InvalidRequest for anything else, for memory that is not C-contiguous, and for an empty value.
    """
    if type(value) is bytes:
        view = memoryview(value)
    elif isinstance(value, Buffer):
        view = value.view(0, value.size_bytes)
    elif tensors.is_tensor(value):
        view = tensors.as_array(value).data
    else:
        view = _contiguous(value)
    if not view.nbytes:
        raise InvalidRequest("the value is empty; a chunk has at least one byte")
    return view


def readable_pieces(values: Sequence[Any]) -> tuple[memoryview, ...]:
    """The bytes of each of ``values``, which make one value together; raises InvalidRequest as ``readable``."""
    if not 0 < len(values) <= MAX_PIECES:
        raise InvalidRequest(f"a value in {len(values)} pieces; 1 to {MAX_PIECES} are allowed")
    return tuple(readable(value) for value in values)


def _contiguous(value: Any) -> memoryview:
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise InvalidRequest("an array that is not C-contiguous is no value; copy it with numpy.ascontiguousarray")
        return value.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(value)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{type(value).__name__} is no contiguous buffer of bytes: {error}") from None


def writable(buffer: Any) -> Buffer:
    """``buffer`` as the destination of a transfer. Raises InvalidRequest if it is read-only or not contiguous."""
    if isinstance(buffer, Buffer):
        named = buffer
    else:
        named = Buffer(tensors.as_array(buffer) if tensors.is_tensor(buffer) else buffer)
    if named.read_only:
        raise InvalidRequest("the buffer to read into is read-only")
    return named
