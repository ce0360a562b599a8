"""Stand-ins for packages that SGLang's modules import and that need CUDA: they import, and nothing of them works.

Only what runs on no path of the tests may be replaced: kernels, and what loads them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

PACKAGES = ("torchvision", "triton", "tvm_ffi")


class Anything(type):
    """The type of every name: a class to inherit from, to ask ``isinstance`` with, to call and to decorate with."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __getitem__(cls, index: Any) -> Any:
        return cls


class StandIn(ModuleType):
    """A module in which every name is there."""

    __path__: ClassVar[list[str]] = []
    __version__ = "999.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages, and every module in them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names come as they are asked for."""


def install() -> None:
    """Put the stand-ins in front of whatever is installed."""
    sys.meta_path.insert(0, StandIns())
