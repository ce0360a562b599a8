"""Source of a model's weights, for any file format; and that of one or several mapped safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tanghulu.errors import ModelUnsupported


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


class SafetensorsDir:
    """A `WeightSource` over the files of a (possibly sharded) checkpoint."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        self._taken: set[str] = set()
        try:
            for path in files:
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ModelUnsupported(f"cannot read {path}: {error}") from error
        for name in list(opened.keys()):
            if name in self._file_of:
                raise ModelUnsupported(f"tensor {name!r} is in {self._file_of[name][0]} and in {path}; remove one")
            self._file_of[name] = path, opened

    def tensor_names(self) -> Iterable[str]:
        return self._file_of.keys()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelUnsupported(f"the checkpoint has no tensor {name!r}; are all of its files here?")
        path, opened = self._file_of[name]
        self._taken.add(name)
        try:
            tensor: torch.Tensor = opened.get_tensor(name)
        except SafetensorError as error:
            raise ModelUnsupported(f"cannot read tensor {name!r} of {path}: {error}") from error
        return tensor

    def untaken(self) -> Iterable[str]:
        return self._file_of.keys() - self._taken

    def close(self) -> None:
        self._file_of.clear()
        self._stack.close()
