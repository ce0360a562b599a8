"""Options of TCP sockets: no congestion control for connections within the machine, and an end for those whose
peer's host is gone.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Final, Protocol

#: A host that answers nothing for this long is gone, whether something was sent to it or not.
DEAD_PEER_S: Final = 30
#: The same for connections whose caller could get the answer elsewhere.
SILENT_HOST_S: Final = 4
#: Sends whatever the peer takes; Linux allows it to all users.
_UNPACED = b"reno"


class OpenSocket(Protocol):
    """The part of a socket that ``unpace_within_machine`` needs; asyncio's and uvloop's have it."""

    def getsockname(self) -> Any:
        """Return the address of this end."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """Set an option."""


def unpace_within_machine(sock: OpenSocket, peer: Any) -> None:
    """Disable the network's congestion control for a connection whose ends, ours and ``peer``, share an address.

    There is no network between them to be congested. BBR, which many machines use, paces by its measurements, and
    underestimates a connection that often waits for work: seen on loopback, 1 MiB in 460 us instead of 270, for
    the rest of the connection's life.
    """
    with contextlib.suppress(OSError):  # only speed is at stake
        if sock.getsockname()[0] == peer[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def notice_dead_peer(sock: OpenSocket | None, dead_s: int = DEAD_PEER_S) -> None:
    """Have the kernel end a connection whose peer's host has answered nothing for ``dead_s``.

    For connections without a pending deadline, on which one side may be silent for long. Not every transport has a
    socket. A peer that reads nothing for ``dead_s`` although more is sent than its kernel buffers counts as dead,
    too.
    """
    if sock is None:
        return
    with contextlib.suppress(OSError):  # a Unix socket: its peer is on this host
        for level, option, value in dead_peer_options(dead_s):
            sock.setsockopt(level, option, value)


def dead_peer_options(dead_s: int) -> list[tuple[int, int, int]]:
    """Return the (level, option, value) of ``notice_dead_peer``, for code that does not open its sockets itself."""
    ask_s = max(1, dead_s // 3)
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, dead_s // ask_s),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_s * 1000),
    ]
