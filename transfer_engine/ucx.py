"""The ucx transport: one-sided READ and WRITE by UCX, through NIXL; an optional extra (``tanghulu[ucx]``).

Owns a link's connections, decides nothing. A link has an agent of its own, and the owner makes one for it: so a batch
that gives up closes its own two agents and nobody else's.

No late duplicate of a failed WRITE. UCX cannot take back what it was told to send, so a path that failed, stalled or
was given up has its agent closed here (no READ lands, nothing is sent any more), and the owner is asked to close its
agent, through which alone what is still on the wire could land, before anything else happens. Where it does not answer
in time the pair's token becomes a fence: every connection to that owner, over ucx, rdma or tcp, tells it first and
posts no slice before the owner has answered that the old end is closed. A retry therefore always lands behind its
predecessor's end, and so does every later batch. For everybody else the lease is the guard: the owner closes a
session's agents before it reuses a range whose lease has run out (see ``access``). UCX's shared-memory lanes, which
would need no agent at the owner, are switched off (see ``ucx_agent``).

Within the segment a session is trusted, as under shm and rdma: UCX checks the segment's bounds, not leases.
"""

from __future__ import annotations

import os
import select
import time

from tanghulu.clock import Clock
from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.fences import Fences
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.segment import SegmentDescriptor
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.transport import Completion, Lost
from tanghulu.transfer_engine.ucx_connection import ConnectionBroken, UcxConnection

#: UCX moves bytes while it is asked whether they have moved: how long to ask without a pause, and the pause after that.
_ASK_S = 0.002
_PAUSE_S = 50e-6


class UcxPeer:
    """A remote segment behind a ucx door. ``fences`` are shared with the other transports to the same owner."""

    def __init__(self, descriptor: SegmentDescriptor, session_id: int, fences: Fences) -> None:
        self._descriptor = descriptor
        self._session_id = session_id
        self._fences = fences

    def connect(self) -> UcxLink:
        """A new link; its agent is made when the first slice is posted on it."""
        return UcxLink(self._descriptor, self._session_id, self._fences)

    def close(self) -> None:
        """Links share no agent."""


class UcxLink:
    """One batch's agents to one peer."""

    def __init__(self, descriptor: SegmentDescriptor, session_id: int, fences: Fences) -> None:
        self._descriptor = descriptor
        self._session_id = session_id
        self._fences = fences
        self._connections: dict[Path, UcxConnection] = {}
        self._ended: list[Completion] = []
        self._broken: set[Path] = set()  # paths whose loss the next poll tells
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._closed = False

    # --- Link

    def post(self, piece: Slice, path: Path) -> None:
        """Queue the slice; ``poll`` posts it. A path that broke since the last poll takes nothing."""
        if path in self._broken:
            return
        try:
            self._connection(path).queue(piece)
        except TanghuluError as error:
            self._break(path, error)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Move bytes until something ended, somebody woke us, or the time is over."""
        self._advance()
        began_s = time.monotonic()
        until_s = began_s + timeout_s
        while not self._ended:
            now_s = time.monotonic()
            moving = any(each.moving for each in self._connections.values())
            if self._serve(0.0 if moving else max(0.0, until_s - now_s)) or now_s >= until_s:
                break
            self._advance()
            if moving and not self._ended and now_s - began_s > _ASK_S:
                time.sleep(_PAUSE_S)
        self._advance()
        self._broken.clear()
        ended, self._ended = self._ended, []
        return ended

    def cut(self, path: Path) -> None:
        """Close the path's agent, here and at the owner."""
        connection = self._connections.pop(path, None)
        if connection is not None:
            self._epoll.unregister(connection.fileno())
            connection.shut()

    @property
    def reusable(self) -> bool:
        """Whether another batch may use this link: nothing is under way on it."""
        return not self._closed and not self._ended and not any(each.busy for each in self._connections.values())

    def fileno(self) -> int:
        """Readable when a control connection is, and always while UCX is moving bytes, which needs to be asked for."""
        if any(each.moving for each in self._connections.values()):
            self.wake()
        return self._epoll.fileno()

    def wake(self) -> None:
        """End a ``poll`` in another thread."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close every agent."""
        if self._closed:
            return
        self._closed = True
        for path in list(self._connections):
            self.cut(path)
        self._epoll.close()
        os.close(self._wake_fd)

    # --- for the engine

    def greet(self, path: Path, timeout_s: float, clock: Clock) -> None:
        """Set up the path's agents; raises NodeUnavailable if that takes longer, or the owner's refusal."""
        until_s = clock.now_s() + timeout_s
        connection = self._connection(path)
        try:
            while not connection.ready:
                left_s = until_s - clock.now_s()
                if left_s <= 0:
                    raise ConnectionBroken(NodeUnavailable(f"{path.label} did not answer within {timeout_s:g} s"))
                for fd, events in self._epoll.poll(left_s):
                    if fd == connection.fileno():
                        connection.serve_control(events)
                self._epoll.modify(connection.fileno(), connection.interest)
        except ConnectionBroken as broken:
            self.cut(path)
            raise broken.error from None

    # --- inside

    def _connection(self, path: Path) -> UcxConnection:
        connection = self._connections.get(path)
        if connection is None:
            connection = UcxConnection(path, self._fences, self._descriptor, self._session_id)
            self._connections[path] = connection
            self._epoll.register(connection.fileno(), connection.interest)
        return connection

    def _serve(self, timeout_s: float) -> bool:
        """Serve control connections, waiting ``timeout_s`` for one; whether somebody woke us."""
        woken = False
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                woken = True
            for path, connection in list(self._connections.items()):
                if connection.fileno() == fd:
                    try:
                        connection.serve_control(events)
                    except ConnectionBroken as broken:
                        self._break(path, broken.error)
        return woken

    def _advance(self) -> None:
        for path, connection in list(self._connections.items()):
            try:
                connection.advance(self._ended)
            except ConnectionBroken as broken:
                self._break(path, broken.error)
            else:
                self._epoll.modify(connection.fileno(), connection.interest)

    def _break(self, path: Path, error: TanghuluError) -> None:
        connection = self._connections.get(path)
        had_slices = connection is None or connection.has_slices
        self.cut(path)
        if had_slices:  # an idle agent that the owner closed is no event for anybody
            self._broken.add(path)
            self._ended.append(Lost(path, error))
