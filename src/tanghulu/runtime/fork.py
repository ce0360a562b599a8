"""Protects forked children from using their parent's connections, and memory that only the parent has mapped.

A child inherits copies of the parent's descriptors. Two processes that use one connection take each other's answers,
so in the child every descriptor named by ``lose_in_children`` is replaced by /dev/null: whatever the child then does
with it (send, close, garbage collection, an event loop that stops watching it) cannot reach the parent's connection,
and for the peer it ends with the parent alone.

A mapping that children do not inherit (MADV_DONTFORK) leaves a hole in the child. ``keep_reserved`` fills it with
inaccessible pages: nothing else is mapped there, which a late unmapping would remove. An access is a SIGSEGV.

Objects that need a notification register with ``notify_in_children``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from tanghulu.errors import InvalidRequest

_PROT_NONE = 0
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class HasDescriptor(Protocol):
    """An open object with a descriptor, such as a socket."""

    def fileno(self) -> int:
        """Return its descriptor; -1 once closed."""


class Forkable(Protocol):
    """An object that is unusable in a forked child."""

    def forget_in_child(self) -> None:
        """Refuse all use from now on, in a child, and touch neither locks nor peers nor mapped memory."""


_descriptors: WeakSet[HasDescriptor] = WeakSet()
_forkables: WeakSet[Forkable] = WeakSet()
_addresses: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()


def lose_in_children(holder: HasDescriptor) -> None:
    """Make forked children lose the descriptor of ``holder``, while it lives."""
    _descriptors.add(holder)


def notify_in_children(thing: Forkable) -> None:
    """Notify ``thing`` in forked children, while it lives."""
    _forkables.add(thing)


def keep_reserved(area: mmap.mmap) -> None:
    """Keep the addresses of ``area`` reserved in forked children, which do not inherit it, while it is mapped."""
    _addresses[area] = np.frombuffer(area, np.uint8).__array_interface__["data"][0]


def keep_for_ever(thing: object) -> None:
    """Never destroy ``thing`` in this process, not even at its end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def refuse_inherited(what: str, opened_by: int, instead: str) -> None:
    """Raise InvalidRequest if this process is not the one that opened ``what``."""
    if os.getpid() != opened_by:
        raise InvalidRequest(f"{what} was opened by process {opened_by} and does not survive fork; {instead}")


def _in_child() -> None:
    for area, address in list(_addresses.items()):
        _reserve(area, address)
    _addresses.clear()
    _lose(list(_descriptors))
    _descriptors.clear()
    things = list(_forkables)
    _forkables.clear()
    for thing in things:
        thing.forget_in_child()


def _reserve(area: mmap.mmap, address: int) -> None:
    if area.closed:
        return
    if _mmap(address, len(area), _PROT_NONE, _FLAGS, -1, 0) != address:
        keep_for_ever(area)  # another mapping was faster: unmapping would remove it


def _lose(holders: list[HasDescriptor]) -> None:
    fds = [fd for holder in holders if (fd := holder.fileno()) >= 0]
    if not fds:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_in_child)
