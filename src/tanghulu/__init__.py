"""tanghulu: a distributed KV-cache store with a conductor for LLM inference.

``tanghulu.connect("127.0.0.1:7400")`` opens the store, ``tanghulu.aio.connect`` opens it for asyncio, and the errors
they raise are in ``tanghulu.errors``. Everything else is under its component's package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tanghulu.version import __version__

if TYPE_CHECKING:
    from tanghulu import aio, errors
    from tanghulu.store.client import Chunk, Client, PutItem, Status, connect

__all__ = ["Chunk", "Client", "PutItem", "Status", "__version__", "aio", "connect", "errors"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import tanghulu.hashing` in an engine costs neither protobuf nor sockets.
    if name in ("aio", "errors"):
        return import_module(f"tanghulu.{name}")
    if name in __all__:
        return getattr(import_module("tanghulu.store.client"), name)
    raise AttributeError(f"module 'tanghulu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
