"""What models read their weights from, whatever the files are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """Tensors by Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``), rotary halves convention."""

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor on the CPU, in the file's dtype (dequantised ones float32); valid after `close`, too.

        Raises ModelUnsupported that names it when it is missing or of a type that cannot be read.
        """

    def has(self, name: str) -> bool:
        """Return whether the tensor exists."""

    def untaken(self) -> Iterable[str]:
        """Names, as the files have them, of the tensors that nobody asked `tensor` for."""

    def close(self) -> None:
        """Unmap the files; tensors handed out before stay valid."""
