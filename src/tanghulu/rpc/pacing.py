"""Options of TCP sockets: no congestion control where a connection never leaves the machine, and an end for those whose
peer's host is gone.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Final, Protocol

#: A host that answers nothing for so long is gone, whether something was sent to it or not.
DEAD_PEER_S: Final = 30
#: The same where somebody waits meanwhile for an answer that he would go and get elsewhere.
SILENT_HOST_S: Final = 4
#: Sends what the peer takes, as it takes it; Linux allows it to everybody.
_UNPACED = b"reno"


class OpenSocket(Protocol):
    """The part of a socket that ``unpace_within_machine`` needs; asyncio's and uvloop's have it."""

    def getsockname(self) -> Any:
        """Where this end is."""
        ...

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """Set an option."""
        ...


def unpace_within_machine(sock: OpenSocket, peer: Any) -> None:
    """Take the network's congestion control away from a connection whose ends, ours and ``peer``, share an address.

    There is no network between them to be congested. BBR, which many machines use, paces by what it has measured, and
    measures too little where a connection often waits for work: seen on loopback, 1 MiB in 460 us instead of 270, for
    the rest of the connection's life.
    """
    with contextlib.suppress(OSError):  # it is a matter of speed alone
        if sock.getsockname()[0] == peer[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def notice_dead_peer(sock: OpenSocket | None, dead_s: int = DEAD_PEER_S) -> None:
    """Have the kernel end a connection whose peer's host has answered nothing for ``dead_s``.

    For connections on which nobody waits for an answer with a deadline, and where one side may be silent for long. Not
    every transport has a socket. A peer that reads nothing for ``dead_s`` although more is sent than its kernel keeps
    counts as dead, too.
    """
    if sock is None:
        return
    with contextlib.suppress(OSError):  # a Unix socket: its peer is on this host
        for level, option, value in dead_peer_options(dead_s):
            sock.setsockopt(level, option, value)


def dead_peer_options(dead_s: int) -> list[tuple[int, int, int]]:
    """The (level, option, value) of ``notice_dead_peer``, for who does not open its sockets itself."""
    ask_s = max(1, dead_s // 3)
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, dead_s // ask_s),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_s * 1000),
    ]
