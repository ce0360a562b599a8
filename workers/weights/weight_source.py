"""Source of a model's weights, for any file format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """Tensors by Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``), rotary halves convention."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor on the CPU, in the file's dtype (dequantised ones float32); valid after `close`, too.

        Raises ModelUnsupported that names it when it is missing or of an unreadable type.
        """

    def has(self, name: str) -> bool:
        """Return whether the tensor exists."""

    def untaken(self) -> Iterable[str]:
        """Return the names, as in the files, of the tensors not requested through `tensor`."""

    def close(self) -> None:
        """Unmap the files; tensors returned before stay valid."""
