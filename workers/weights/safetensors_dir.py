"""Reads weights from one or several safetensors files, which are mapped, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tanghulu.errors import ModelUnsupported


class SafetensorsDir:
    """A `WeightSource` over the files of a (possibly sharded) checkpoint."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for path in files:
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise ModelUnsupported(f"cannot read {path}: {error}") from error
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def tensor_names(self) -> Iterable[str]:
        return self._file_of.keys()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelUnsupported(f"the checkpoint has no tensor {name!r}")
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._file_of.clear()
        self._stack.close()
