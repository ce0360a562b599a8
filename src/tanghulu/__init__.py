"""tanghulu: a distributed KV-cache store with a conductor for LLM inference.

``tanghulu.connect("127.0.0.1:7400")`` opens the store; everything else is under its component's package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tanghulu.version import __version__

if TYPE_CHECKING:
    from tanghulu.store.client import connect

__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import tanghulu.hashing` in an engine costs neither protobuf nor sockets.
    if name == "connect":
        from tanghulu.store.client import connect

        return connect
    raise AttributeError(f"module 'tanghulu' has no attribute {name!r}")
