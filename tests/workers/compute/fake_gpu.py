"""Tensors on a GPU that is not there: they have a device, a type and a shape, and no bytes.

torch's FakeTensorMode makes them and checks each operation's devices, types and shapes. Python's indexing of CUDA
tensors asks the driver for the current device, so `_WithoutDriver` does it by the operations that indexing stands for.
A torch built for CUDA asks it for the kernels of attention as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Inside, tensors of CUDA devices may be made; real ones on the CPU may be used beside them."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _WithoutDriver():
        yield mode


#: Methods whose Python side asks the driver for the current device, and what computes the same without.
_SAME: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.copy_: torch.ops.aten.copy_,
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.contiguous: torch.ops.aten.contiguous,
}


class _WithoutDriver(TorchFunctionMode):
    """``tensor[...]`` and ``tensor[...] = value`` of fake tensors, by select, slice, unsqueeze and index."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return _taken(*args)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], FakeTensor):
            tensor, key, value = args
            if any(isinstance(each, torch.Tensor) for each in _parts(key)):
                return tensor.index_put_(_parts(key), value)
            return torch.ops.aten.copy_(_taken(tensor, key), value)
        if func is F.scaled_dot_product_attention and not torch.backends.cuda.math_sdp_enabled():
            return _efficient(*args, **(kwargs or {}))
        return _SAME.get(func, func)(*args, **(kwargs or {}))


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attn_mask: torch.Tensor) -> torch.Tensor:
    """The one kernel that callers leave torch to choose from."""
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, False)[0]
    return attended


def _parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _taken(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    parts, dim = _parts(key), 0
    indices: list[torch.Tensor | None] = []
    if ... in parts:
        at = parts.index(...)
        missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
    for part in parts:
        if isinstance(part, torch.Tensor | list):
            index = torch.as_tensor(part)
            assert index.device in (tensor.device, torch.device("cpu"))
            indices.append(index)
        elif part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        else:
            tensor = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        if not isinstance(part, torch.Tensor | list):
            indices.append(None)
        dim += 1
    return torch.ops.aten.index(tensor, indices) if any(each is not None for each in indices) else tensor
