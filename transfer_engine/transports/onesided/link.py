"""Links of the one-sided transports, which bypass the owner's process: rdma and ucx differ in their movers.

Owns a link's connections, decides nothing. ``rdma`` and ``ucx`` describe how they ensure that no WRITE lands late.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol

from tanghulu.runtime.tasks import undo_on_error
from tanghulu.transfer_engine.core.links import WiredLink
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Completion, ConnectContext, ConnectionBroken
from tanghulu.transfer_engine.transports.onesided.connection import Mover, OneSidedConnection
from tanghulu.transfer_engine.transports.onesided.control import Control
from tanghulu.transfer_engine.transports.onesided.wire import Dialect

#: For transports that move bytes only while polled: seconds to poll without a pause, and the pause after that.
_POLL_S = 0.002
_PAUSE_S = 50e-6


class Movers(Protocol):
    """Makes one link's movers, and owns what they share."""

    dialect: Dialect

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> Mover:
        """Return a mover for connection ``token``; ``wake`` ends a ``poll``. Raises NodeUnavailable, TransferFailed."""

    def close(self) -> None:
        """Release what they share; every mover is closed."""


class OneSidedPeer:
    """A remote segment behind a ``OneSidedListener``."""

    def __init__(
        self, context: ConnectContext, movers: Callable[[], Movers], paths: Callable[[int], list[Path]]
    ) -> None:
        """``movers`` is called once for each link; ``paths`` is ``TransportPeer.paths``."""
        self._context = context
        self._movers = movers
        self._paths = paths

    def paths(self, rank: int) -> list[Path]:
        """Return every path, as the transport pairs devices and endpoints."""
        return self._paths(rank)

    def connect(self) -> OneSidedLink:
        """Return a new link; its movers are made when the first slice is posted on them."""
        return OneSidedLink(self._context, self._movers())

    def close(self) -> None:
        """Do nothing: links share nothing."""


class OneSidedLink(WiredLink[OneSidedConnection]):
    """One batch's movers to one peer."""

    def __init__(self, context: ConnectContext, movers: Movers) -> None:
        super().__init__(select.epoll())
        self._context = context
        self._movers = movers

    # --- Link

    def poll(self, timeout_s: float) -> list[Completion]:
        """Post queued slices, take ended ones; sleep, or keep polling, while there are none."""
        self._advance()
        if not self._ended and timeout_s > 0:
            self._arm()
            self._advance()  # ended before it was armed
        began_s = now_s = time.monotonic()
        while True:
            polling = any(each.needs_polling for each in self._connections.values())
            left_s = began_s + timeout_s - now_s
            woken = self._serve_ready(0.0 if polling or self._ended else max(0.0, left_s))
            self._advance()
            if self._ended or woken or not polling or left_s <= 0:
                return self._take_ended()
            if now_s - began_s > _POLL_S:
                time.sleep(_PAUSE_S)
            now_s = time.monotonic()

    def fileno(self) -> int:
        """Return a descriptor, readable when a connection's is, and always while a moving slice needs polling."""
        if any(each.needs_polling for each in self._connections.values()):
            self.wake()
        self._arm()
        return super().fileno()

    def close(self) -> None:
        """Close every mover."""
        if not self._closed:
            super().close()
            self._movers.close()

    def check(self) -> None:
        """Assert the invariants, also of the connections."""
        super().check()
        for connection in self._connections.values():
            connection.check()

    # --- WiredLink

    def _connect(self, path: Path) -> OneSidedConnection:
        control = Control(path, self._movers.dialect, self._context)
        with undo_on_error(control.close):
            mover = self._movers.make(path, control.token, self.wake)
        connection = OneSidedConnection(path, mover, control, self._context.fences)
        connection.watched = control.interest
        self._watch(connection, control.fileno(), connection.watched)
        if mover.fileno() >= 0:
            self._watch(connection, mover.fileno(), select.EPOLLIN)
        return connection

    def _queue(self, connection: OneSidedConnection, piece: Slice) -> None:
        connection.queue(piece)

    def _serve(self, connection: OneSidedConnection, fd: int, events: int) -> None:
        if fd == connection.control.fileno():
            connection.control.serve(events)
        elif fd == connection.mover.fileno():
            connection.mover.woken()
        if not connection.greeted:
            connection.advance(self._ended)
        self._watch_control(connection)

    def _shut(self, connection: OneSidedConnection) -> None:
        connection.shut()

    # --- inside

    def _advance(self) -> None:
        for path, connection in list(self._connections.items()):
            try:
                connection.advance(self._ended)
            except ConnectionBroken as broken:
                self._break(path, broken.error)
            else:
                self._watch_control(connection)

    def _watch_control(self, connection: OneSidedConnection) -> None:
        interest = connection.control.interest
        if interest != connection.watched:
            self._poller.modify(connection.control.fileno(), interest)
            connection.watched = interest

    def _arm(self) -> None:
        for connection in self._connections.values():
            connection.arm()
