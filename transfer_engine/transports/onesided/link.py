"""Links of the one-sided transports, which go past the owner's process: rdma and ucx differ in their movers.

Owns a link's connections, decides nothing. ``rdma`` and ``ucx`` say how it is assured that no WRITE lands late.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol

from tanghulu.transfer_engine.core.links import WiredLink
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Completion, ConnectContext, ConnectionBroken
from tanghulu.transfer_engine.transports.onesided.connection import Mover, OneSidedConnection
from tanghulu.transfer_engine.transports.onesided.control import Control
from tanghulu.transfer_engine.transports.onesided.wire import Dialect

#: Where bytes move only while it is asked whether they have: how long to ask without a pause, and the pause after that.
_ASK_S = 0.002
_PAUSE_S = 50e-6


class Movers(Protocol):
    """Makes one link's movers, and owns what they share."""

    dialect: Dialect

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> Mover:
        """A mover for the connection of ``token``; ``wake`` ends a ``poll``. Raises NodeUnavailable, TransferFailed."""
        ...

    def close(self) -> None:
        """Let go of what they share; every mover is closed."""
        ...


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
        """Every path, as the transport pairs devices and endpoints."""
        return self._paths(rank)

    def connect(self) -> OneSidedLink:
        """A new link; its movers are made when the first slice is posted on them."""
        return OneSidedLink(self._context, self._movers())

    def close(self) -> None:
        """Links share nothing."""


class OneSidedLink(WiredLink[OneSidedConnection]):
    """One batch's movers to one peer."""

    def __init__(self, context: ConnectContext, movers: Movers) -> None:
        super().__init__(select.epoll())
        self._context = context
        self._movers = movers

    # --- Link

    def poll(self, timeout_s: float) -> list[Completion]:
        """Post what is queued, take what ended; sleep, or keep asking, while there is nothing."""
        self._advance()
        if not self._ended and timeout_s > 0:
            self._arm()
            self._advance()  # what ended before it was armed
        began_s = now_s = time.monotonic()
        while True:
            asking = any(each.must_be_asked for each in self._connections.values())
            left_s = began_s + timeout_s - now_s
            woken = self._serve_ready(0.0 if asking or self._ended else max(0.0, left_s))
            self._advance()
            if self._ended or woken or not asking or left_s <= 0:
                return self._take_ended()
            if now_s - began_s > _ASK_S:
                time.sleep(_PAUSE_S)
            now_s = time.monotonic()

    def fileno(self) -> int:
        """Readable when a connection's descriptor is, and always while something is moving that must be asked for."""
        if any(each.must_be_asked for each in self._connections.values()):
            self.wake()
        self._arm()
        return super().fileno()

    def close(self) -> None:
        """Close every mover."""
        if not self._closed:
            super().close()
            self._movers.close()

    def check(self) -> None:
        """Assert the invariants of the connections too."""
        super().check()
        for connection in self._connections.values():
            connection.check()

    # --- WiredLink

    def _connect(self, path: Path) -> OneSidedConnection:
        control = Control(path, self._movers.dialect, self._context)
        try:
            mover = self._movers.make(path, control.token, self.wake)
        except BaseException:  # an interrupt, too: nobody else knows the socket; it is raised on
            control.close()
            raise
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
