"""The network as links see it: connections and their readiness. ``tcp.sockets`` has the machine's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tanghulu.transfer_engine.core.paths import Path
from tanghulu.types import Address


class StreamSocket(Protocol):
    """The part of a ``socket.socket`` in blocking mode that a stream uses, with its exceptions.

    With MSG_DONTWAIT a call never waits: it raises BlockingIOError instead. Without it ``recv_into`` and
    ``recvmsg_into`` wait for the first byte, and raise BlockingIOError after the time set by ``setsockopt(SOL_SOCKET,
    SO_RCVTIMEO, timeval)``; ``recv_into`` with MSG_WAITALL waits until the buffer is full, or that time has passed.
    """

    def setblocking(self, flag: bool, /) -> None:
        """Called once, with True, when it has begun to connect."""

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """Called with SO_RCVTIMEO alone."""

    def send(self, data: bytes, flags: int, /) -> int:
        """Give bytes to the connection."""

    def sendmsg(self, buffers: Iterable[memoryview | bytes], ancillary: tuple[()], flags: int, /) -> int:
        """Give bytes to the connection."""

    def recv_into(self, buffer: memoryview, num_bytes: int, flags: int, /) -> int:
        """Receive bytes; 0 when the peer has closed. ``num_bytes`` 0 receives as many as the buffer holds."""

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancillary_bytes: int, flags: int, /
    ) -> tuple[int, list[Any], int, Any]:
        """Receive bytes into the first buffer, then the next; their number is the first of the answer."""

    def fileno(self) -> int:
        """Return the number that identifies it to a Poller."""

    def close(self) -> None:
        """Close the connection; nothing is received afterwards."""


class Poller(Protocol):
    """The part of ``select.epoll`` that a link uses."""

    def register(self, fd: int, eventmask: int, /) -> None:
        """Watch a descriptor."""

    def modify(self, fd: int, eventmask: int, /) -> None:
        """Watch for something else."""

    def unregister(self, fd: int, /) -> None:
        """Stop watching a descriptor."""

    def poll(self, timeout: float | None, /) -> list[tuple[int, int]]:
        """Return the ready (descriptor, events), after at most ``timeout`` seconds."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when something is ready."""

    def close(self) -> None:
        """Release the descriptor."""


class Network(Protocol):
    """Makes connections and pollers."""

    def connect(self, path: Path, address: Address) -> StreamSocket:
        """Return a socket that has begun to connect, without waiting, over the path's local device.

        Raises NodeUnavailable if the address cannot even be tried.
        """

    def poller(self) -> Poller:
        """Return a new Poller."""
