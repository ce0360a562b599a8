"""Reads weights from one or several mapped safetensors files, one tensor at a time."""

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
            raise ModelUnsupported(f"the checkpoint has no tensor {name!r}")
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
