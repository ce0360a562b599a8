"""What a transport is to the engine: links that post and poll, and take no decision.

A *link* is one set of connections to one peer, lent to one batch at a time (like a connection of an HTTP pool): so a
batch that gives up closes its own connections and nobody else's, and no lock is held while bytes move. Several threads
use a peer at once through several links. A link's own connections serve several paths (streams, devices).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Slice


class Arrived(NamedTuple):
    """All bytes of the slice are where they belong."""

    slice_id: int


class Refused(NamedTuple):
    """The peer answered the slice with a typed error and touched nothing."""

    slice_id: int
    error: TanghuluError


class Lost(NamedTuple):
    """The path broke with slices on it; none of their bytes will land in local memory any more."""

    path: Path
    error: TanghuluError


class Corrupt(NamedTuple):
    """All bytes of a verified slice have arrived, and they are not those that were sent."""

    slice_id: int
    error: TanghuluError


Completion = Arrived | Refused | Lost | Corrupt


class ConnectionBroken(Exception):
    """A link's connection is of no use any more; ``error`` says why, in the caller's terms."""

    def __init__(self, error: TanghuluError) -> None:
        super().__init__(error.message)
        self.error = error


class Link(Protocol):
    """One batch's connections to one peer on one transport; used by one thread at a time, except ``wake``."""

    def post(self, piece: Slice, path: Path) -> None:
        """Start moving the slice over ``path``. Never blocks on the peer and never raises: failures are completions."""
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """Move bytes; return what ended. Waits up to ``timeout_s`` for something to happen, less if it does."""
        ...

    def cut(self, path: Path) -> None:
        """Close the path's connection; its slices are forgotten without a completion, and no byte of them lands locally
        afterwards. A later post connects anew.
        """
        ...

    @property
    def reusable(self) -> bool:
        """Whether another batch may use it: nothing is under way."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable when ``poll`` has something to do; -1 when everything ends inside ``post``."""
        ...

    def wake(self) -> None:
        """End a ``poll`` that waits in another thread."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...

    def check(self) -> None:
        """Assert the invariants of its connections."""
        ...


class Peer(Protocol):
    """A remote segment as one transport reaches it: makes links."""

    def connect(self) -> Link:
        """A new link; does not wait for the peer."""
        ...

    def close(self) -> None:
        """Give up what all links share."""
        ...
