"""Tensors as values of the store. The only file of the store that imports torch, and only when a tensor is met."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tanghulu.errors import InvalidRequest

if TYPE_CHECKING:
    import torch


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor of any dtype, without a copy. Raises InvalidRequest for others."""
    import torch

    if tensor.device.type != "cpu":
        raise InvalidRequest(f"a tensor on {tensor.device} is not in host memory; move it with .cpu() first")
    if not tensor.is_contiguous():
        raise InvalidRequest("a tensor that is not contiguous is no value; call .contiguous() first")
    flat: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def from_array(array: npt.NDArray[np.uint8], dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor over ``array``'s memory, which it keeps alive. Raises InvalidRequest if the size does not fit."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # chunks are immutable: documented
        tensor = torch.from_numpy(array)
    try:
        if dtype is not None:
            tensor = tensor.view(dtype)
        return tensor if shape is None else tensor.view(shape)
    except RuntimeError as error:
        raise InvalidRequest(f"{array.size} bytes are no tensor of {dtype} with shape {shape}: {error}") from None
