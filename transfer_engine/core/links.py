"""Common part of links that consist of connections (tcp, rdma, ucx): one connection for each path.

Owns the connections' life and the poller that watches them; decides nothing. A broken connection is cut, and its slices
are reported as one Lost by the next poll.
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.transfer_engine.core.network import Poller
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Completion, ConnectionBroken, Lost


class WiredConnection(Protocol):
    """Operations required of a link's connections."""

    path: Path

    @property
    def greeted(self) -> bool:
        """Whether the peer has admitted it."""

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""

    @property
    def has_slices(self) -> bool:
        """Whether a slice is under way."""


C = TypeVar("C", bound=WiredConnection)


class WiredLink(ABC, Generic[C]):
    """One batch's connections to one peer; a transport defines how they are made, served and shut."""

    def __init__(self, poller: Poller) -> None:
        self._connections: dict[Path, C] = {}
        self._by_fd: dict[int, C] = {}
        self._ended: list[Completion] = []
        self._broken: set[Path] = set()  # paths whose loss the next poll reports
        self._poller = poller
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, select.EPOLLIN)
        self._closed = False
        self._waking = threading.Lock()  # held by a wake, so that ``close`` does not close the descriptor under it

    # --- provided by a transport

    @abstractmethod
    def _connect(self, path: Path) -> C:
        """Return a new connection, which begins to connect and ``_watch``es its descriptors. Raises TanghuluError."""

    @abstractmethod
    def _queue(self, connection: C, piece: Slice) -> None:
        """Have the connection move the slice."""

    @abstractmethod
    def _serve(self, connection: C, fd: int, events: int) -> None:
        """Serve a connection with a ready descriptor; raises ConnectionBroken."""

    @abstractmethod
    def _shut(self, connection: C) -> None:
        """End the connection; nothing lands here afterwards."""

    # --- Link

    def post(self, piece: Slice, path: Path) -> None:
        """Queue the slice on the path's connection, made if there is none; ``poll`` moves it.

        A path that broke since the last poll takes nothing: the slice is lost with the others on it.
        """
        if path in self._broken:
            return
        try:
            self._queue(self._connection(path), piece)
        except ConnectionBroken as broken:
            self._break(path, broken.error)
        except TanghuluError as error:
            self._break(path, error)

    def cut(self, path: Path) -> None:
        """End the path's connection."""
        connection = self._connections.pop(path, None)
        if connection is None:
            return
        for fd in [fd for fd, each in self._by_fd.items() if each is connection]:
            del self._by_fd[fd]
            self._poller.unregister(fd)
        self._shut(connection)

    @property
    def reusable(self) -> bool:
        """Whether another batch may use this link: nothing is under way on it."""
        if self._closed or self._ended:
            return False
        for connection in self._connections.values():  # noqa: SIM110 - read after each transfer; any() is twice as slow
            if connection.busy:
                return False
        return True

    def fileno(self) -> int:
        """Return the poller's descriptor: readable when a connection's is."""
        return self._poller.fileno()

    def wake(self) -> None:
        """End a ``poll`` in another thread."""
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End every connection."""
        if self._closed:
            return
        with self._waking:
            self._closed = True
        for path in list(self._connections):
            self.cut(path)
        self._poller.close()
        os.close(self._wake_fd)

    def check(self) -> None:
        """Assert the invariants: only connections of a path are watched, and a closed link has none."""
        assert {id(each) for each in self._by_fd.values()} <= {id(each) for each in self._connections.values()}
        assert all(connection.path is path for path, connection in self._connections.items())
        assert not (self._closed and self._connections)

    # --- for the engine

    def greet(self, path: Path, timeout_s: float, clock: Clock) -> None:
        """Make the path's connection and wait until the peer has admitted it.

        Raises NodeUnavailable if that takes longer, or the peer's refusal.
        """
        until_s = clock.now_s() + timeout_s
        connection = self._connection(path)
        try:
            while not connection.greeted:
                left_s = until_s - clock.now_s()
                if left_s <= 0:
                    raise ConnectionBroken(NodeUnavailable(f"{path.label} did not answer within {timeout_s:g} s"))
                for fd, events in self._poller.poll(left_s):
                    if fd == self._wake_fd:
                        os.eventfd_read(fd)
                    self._serve(connection, fd, events)
        except ConnectionBroken as broken:
            self.cut(path)
            raise broken.error from None

    # --- inside

    def _connection(self, path: Path) -> C:
        connection = self._connections.get(path)
        if connection is None:
            connection = self._connections[path] = self._connect(path)
        return connection

    def _watch(self, connection: C, fd: int, events: int) -> None:
        self._by_fd[fd] = connection
        self._poller.register(fd, events)

    def _serve_ready(self, timeout_s: float) -> bool:
        """Serve ready connections, waiting ``timeout_s`` for one; return whether ``wake`` was called."""
        woken = False
        for fd, events in self._poller.poll(timeout_s):
            ready = self._by_fd.get(fd)
            if ready is not None:
                self._attempt(ready, fd, events)
            elif fd == self._wake_fd:
                os.eventfd_read(fd)
                woken = True
        return woken

    def _attempt(self, connection: C, fd: int, events: int) -> None:
        try:
            self._serve(connection, fd, events)
        except ConnectionBroken as broken:
            self._break(connection.path, broken.error)

    def _take_ended(self) -> list[Completion]:
        if self._broken:
            self._broken.clear()
        ended, self._ended = self._ended, []
        return ended

    def _break(self, path: Path, error: TanghuluError) -> None:
        connection = self._connections.get(path)
        had_slices = connection is None or connection.has_slices
        self.cut(path)
        if had_slices:  # the end of an idle connection by its peer is no event
            self._broken.add(path)
            self._ended.append(Lost(path, error))
