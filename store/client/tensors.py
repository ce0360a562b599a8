"""Tensors as values of the store. The only file of the store that imports torch, and only when a tensor is met.

A plain value is a tensor's bytes and nothing else: its reader knows dtype and shape. ``put_tensor`` puts a header in
front, which ``get_tensor`` reads:

    b"THTENSOR" | header_bytes u32 | JSON {"dtype": "bfloat16", "shape": [2, 3]} | spaces | the elements in C order

Numbers are little-endian. ``header_bytes`` counts everything in front of the elements and is a multiple of 64, so the
elements are aligned as the chunk is. ``dtype`` is torch's name of it.
"""

from __future__ import annotations

import json
import struct
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tanghulu.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

_MAGIC = b"THTENSOR"
_HEAD = struct.Struct("<8sI")
_ALIGNMENT = 64
#: A shape of more than a thousand dimensions is invalid.
MAX_HEADER_BYTES = 16 << 10


def from_array(array: npt.NDArray[np.uint8], dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Return a tensor over ``array``'s memory, which it keeps alive. Raises InvalidRequest if the size does not fit."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # chunks are immutable: documented
        tensor = torch.from_numpy(array)
    try:
        if dtype is not None:
            tensor = tensor.view(dtype)
        return tensor if shape is None else tensor.view(shape)
    except RuntimeError as error:
        raise InvalidRequest(
            f"{array.size} bytes do not form a tensor of {dtype} with shape {shape}: {error}"
        ) from None


def with_header(tensor: Any) -> list[Any]:
    """Return the pieces of a value with the tensor's description; a tensor that is not contiguous is copied first.

    Raises InvalidRequest for anything but a dense tensor in host memory.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"a {type(tensor).__name__} is not a torch tensor; use put() for arrays and bytes")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidRequest(
            f"a {tensor.dtype} tensor of layout {tensor.layout} has no plain bytes; make it dense first"
        )
    described = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    text = json.dumps(described, separators=(",", ":")).encode()
    header_bytes = -(-(_HEAD.size + len(text)) // _ALIGNMENT) * _ALIGNMENT
    header = (_HEAD.pack(_MAGIC, header_bytes) + text).ljust(header_bytes)
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return [header, elements] if elements.nbytes else [header]


def from_value(key: str, value: npt.NDArray[np.uint8], *, shared: bool) -> torch.Tensor:
    """Return the tensor in a value made by ``with_header``; ``shared``: over its memory.

    Raises InvalidRequest for any other value.
    """
    import torch

    magic, header_bytes = _HEAD.unpack_from(value.data) if value.size >= _HEAD.size else (b"", 0)
    if magic != _MAGIC or not _HEAD.size < header_bytes <= min(value.size, MAX_HEADER_BYTES):
        raise InvalidRequest(f"{key!r} was not stored by put_tensor(); read it with get()")
    try:
        described = json.loads(value[_HEAD.size : header_bytes].tobytes())
        dtype, shape = getattr(torch, described["dtype"]), tuple(map(int, described["shape"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"the header of tensor {key!r} is unreadable: {error}") from None
    if not isinstance(dtype, torch.dtype):
        raise InvalidRequest(f"the tensor {key!r} is of dtype {described['dtype']!r}, which this torch lacks")
    if header_bytes == value.size:
        return torch.empty(shape, dtype=dtype)
    tensor = from_array(value[header_bytes:], dtype, shape)
    return tensor if shared else tensor.clone()
