"""Options of sockets, hosts' addresses, identification of the process at the other end, and a shortcut on this host.

A pid (SO_PEERCRED) is valid in one PID namespace only: for a peer in another one, such as every container has, the
kernel returns 0. Its pidfd (SO_PEERPIDFD, Linux 6.5) is valid in every namespace, and from Linux 6.9 on each process
has its own inode there, which no other process gets until the machine restarts. So such a peer is identified by its
inode. Example: pid 4711 of our namespace is 4711; a process of a container whose pidfd has the inode 9000 is -9000.

The shortcut is a Unix socket named after the port. A small call over the loopback costs several microseconds more each
way than over a Unix socket, and a put waits for four of them. A process that serves a port on the loopback also listens
on the abstract Unix socket of that name; abstract names belong to the network namespace, exactly as the port does.
Anybody can take such a name, so a caller checks the listener: it must be the same user, or root. If anything is amiss
the TCP address is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final, Protocol

from tanghulu.errors import NodeUnavailable
from tanghulu.types import Address

_SO_PEERPIDFD = 77
_UCRED = struct.Struct("3i")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("", "0.0.0.0", "::")


def peer_uid(sock: socket.socket) -> int:
    """Return the user of the process that connected."""
    return _credentials(sock)[1]


def peer_process(sock: socket.socket) -> int:
    """Return a number of the peer's process: its pid, or, for one of another PID namespace, a negative one.

    0 if the kernel (before Linux 6.9) cannot distinguish processes of other namespaces.
    """
    pid = _credentials(sock)[0]
    if pid > 0:
        return pid
    try:
        pidfd = peer_pidfd(sock)
    except OSError:
        return 0
    try:
        return -inode_of_process(pidfd)
    finally:
        os.close(pidfd)


def peer_pidfd(sock: socket.socket) -> int:
    """Return a pidfd of the peer's process, owned by the caller; raises OSError if gone or not nameable here."""
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
        return pidfd
    except OSError:  # an older kernel: the peer waits for our answer, so its pid cannot have been reused
        return os.pidfd_open(_credentials(sock)[0])


def inode_of_process(pidfd: int) -> int:
    """Return the kernel's inode of the process of ``pidfd``; 0 before Linux 6.9, where all pidfds share one."""
    anonymous = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        found = os.fstat(pidfd)
        return 0 if found.st_dev == os.fstat(anonymous).st_dev else found.st_ino
    finally:
        os.close(anonymous)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make socket files created inside private to this user."""
    previous = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(previous)


def listen_nearby(host: str, port: int) -> socket.socket | None:
    """Return a socket listening beside ``host:port``; None if that is not on the loopback or the name is taken."""
    if host not in _LOOPBACK + _ANY:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(port))
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def dial_nearby(address: Address) -> socket.socket | None:
    """Return a connected, blocking socket to the process serving ``address`` on this host; None if there is none."""
    if address.host not in _LOOPBACK:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # a listener that accepts nobody must not block us
        sock.connect(_name(address.port))
        uid = peer_uid(sock)
    except OSError:
        sock.close()
        return None
    if uid not in (os.geteuid(), 0):
        sock.close()
        return None
    sock.setblocking(True)
    return sock


def _name(port: int) -> str:
    return f"\0tanghulu-{port}"


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


async def look_up(host: str) -> list[str]:
    """Return the IP addresses of ``host``, each once; its own if it is one. Raises NodeUnavailable."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NodeUnavailable(f"cannot resolve {host}: {error}") from error
    return list(dict.fromkeys(str(each[4][0]) for each in found))
