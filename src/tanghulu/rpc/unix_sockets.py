"""Unix sockets of a host: the process at the other end, and a shortcut to one that is known by its TCP address.

A pid (SO_PEERCRED) means something in one PID namespace only: of a peer in another one, as every container has its own,
the kernel says 0. Its pidfd (SO_PEERPIDFD, Linux 6.5) is good in every namespace, and from Linux 6.9 on each process
has an inode of its own there, which no other process gets until the machine restarts. So such a peer is known by its
inode. Example: pid 4711 of our namespace is 4711; a process of a container whose pidfd has the inode 9000 is -9000.

The shortcut is a Unix socket named after the port. A small call over the loopback costs several microseconds more each
way than over a Unix socket, and a put waits for four of them. Whoever serves a port on the loopback also listens on the
abstract Unix socket of that name; abstract names belong to the network namespace, exactly as the port does. Anybody can
take such a name, so a caller looks who listens: it must be the same user, or root. Where anything is amiss the TCP
address works as ever.
"""

from __future__ import annotations

import os
import socket
import struct

from tanghulu.types import Address

_SO_PEERPIDFD = 77
_UCRED = struct.Struct("3i")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("", "0.0.0.0", "::")


def peer_uid(sock: socket.socket) -> int:
    """The user of the process that connected."""
    return _credentials(sock)[1]


def peer_process(sock: socket.socket) -> int:
    """A number of the peer's process: its pid, or, for one of another PID namespace, a negative one.

    0 where the kernel (before Linux 6.9) cannot tell processes of other namespaces apart.
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
    """A pidfd of the peer's process, which the caller owns; OSError if it is gone or cannot be named here."""
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
        return pidfd
    except OSError:  # an older kernel: the peer waits for our answer, so its pid cannot have been reused
        return os.pidfd_open(_credentials(sock)[0])


def inode_of_process(pidfd: int) -> int:
    """The inode by which the kernel knows the process of ``pidfd``; 0 before Linux 6.9, where all pidfds share one."""
    anonymous = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        found = os.fstat(pidfd)
        return 0 if found.st_dev == os.fstat(anonymous).st_dev else found.st_ino
    finally:
        os.close(anonymous)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def listen_nearby(host: str, port: int) -> socket.socket | None:
    """A socket to listen on beside ``host:port``; None if that does not serve the loopback or the name is taken."""
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
    """A connected, blocking socket to the process that serves ``address`` on this host; None if there is none."""
    if address.host not in _LOOPBACK:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # a listener that takes nobody in must not hold us up
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
