"""The rdma transport: one-sided READ and WRITE through RC queue pairs, one path per pair of devices.

Owns a link's connections, decides nothing. The owner's process takes no part in a transfer: it registered its segment
once per device and answers the set-up of queue pairs.

No late duplicate of a failed WRITE. RC delivers a packet of a queue pair at most once, in order, and only while both
ends live, so what could land late is what is on the wire when this end gives up. A path that failed, stalled or was
given up has its queue pair destroyed here (no READ lands, nothing is sent any more), and the owner is asked to destroy
its end before anything else happens; where it does not answer in time, the pair's token becomes a fence: every
connection to that owner, over rdma or tcp, tells it first and posts no slice before the owner has answered that the old
end is gone. A retry therefore always lands behind its predecessor's end, and so does every later batch. For everybody
else the lease is the guard: the owner destroys a session's queue pairs before it reuses a range whose lease has run out
(see ``access``). What a holder gives back itself it promises not to touch, as under shm.

Within the segment a session is trusted, as under shm: the device checks the segment's bounds, not leases.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

from tanghulu.clock import Clock
from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.fences import Fences
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.rdma_connection import ConnectionBroken, RdmaConnection
from tanghulu.transfer_engine.rdma_devices import LocalDevices, Staging
from tanghulu.transfer_engine.segment import SegmentDescriptor
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.transport import Completion, Lost


class RdmaPeer:
    """A remote segment behind one or more devices. ``fences`` are shared with the tcp transport to the same owner."""

    def __init__(self, descriptor: SegmentDescriptor, session_id: int, devices: LocalDevices, fences: Fences) -> None:
        self._descriptor = descriptor
        self._session_id = session_id
        self._devices = devices
        self._fences = fences

    def connect(self) -> RdmaLink:
        """A new link; its queue pairs are made when the first slice is posted on them."""
        return RdmaLink(self._descriptor, self._session_id, self._devices, self._fences)

    def close(self) -> None:
        """Links share no queue pair."""


def pair_devices(names: Sequence[str], num_remote: int) -> list[tuple[str, int]]:
    """(local device, index of the owner's rdma endpoint) of every path.

    The n-th local device talks to the n-th of the owner's, in the order in which both are named: rails, as clusters are
    wired. The longer list starts again at the front of the shorter one. Example: two here, three there: 0-0, 1-1, 0-2.
    """
    return [(names[n % len(names)], n % num_remote) for n in range(max(len(names), num_remote))]


class RdmaLink:
    """One batch's queue pairs to one peer."""

    def __init__(self, descriptor: SegmentDescriptor, session_id: int, devices: LocalDevices, fences: Fences) -> None:
        self._descriptor = descriptor
        self._session_id = session_id
        self._devices = devices
        self._fences = fences
        self._connections: dict[Path, RdmaConnection] = {}
        self._staging: dict[str, Staging] = {}
        self._actions: dict[int, Callable[[int], None]] = {}  # by descriptor: what its readiness means
        self._ended: list[Completion] = []
        self._broken: set[Path] = set()  # paths whose loss the next poll tells
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._closed = False
        devices.use()

    # --- Link

    def post(self, piece: Slice, path: Path) -> None:
        """Queue the slice; ``poll`` hands all that was queued to the device in one chain.

        A path that broke since the last poll takes nothing: the slice is lost with the others on it.
        """
        if path in self._broken:
            return
        try:
            self._connection(path).queue(piece)
        except TanghuluError as error:
            self._break(path, error)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Post what is queued, take what ended; sleep on the completion channels when there is nothing."""
        self._advance()
        if not self._ended and timeout_s > 0:
            self._arm()
            self._advance()  # what ended before it was armed
        for fd, events in self._epoll.poll(0 if self._ended else timeout_s):
            action = self._actions.get(fd)
            if action is not None:
                action(events)
            elif fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
        self._advance()
        self._broken.clear()
        ended, self._ended = self._ended, []
        return ended

    def cut(self, path: Path) -> None:
        """Destroy the path's queue pair, here and at the owner."""
        connection = self._connections.pop(path, None)
        if connection is None:
            return
        for fd in connection.descriptors:
            del self._actions[fd]
            self._epoll.unregister(fd)
        connection.shut()

    @property
    def reusable(self) -> bool:
        """Whether another batch may use this link: nothing is under way on it."""
        return not self._closed and not self._ended and not any(each.busy for each in self._connections.values())

    def fileno(self) -> int:
        """The epoll descriptor: readable when a completion channel or a control connection is."""
        self._arm()
        return self._epoll.fileno()

    def wake(self) -> None:
        """End a ``poll`` in another thread."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Destroy every queue pair."""
        if self._closed:
            return
        self._closed = True
        for path in list(self._connections):
            self.cut(path)
        for staging in self._staging.values():
            staging.close()
        self._epoll.close()
        os.close(self._wake_fd)
        self._devices.let_go()

    # --- for the engine

    def greet(self, path: Path, timeout_s: float, clock: Clock) -> None:
        """Set up the path's queue pairs; raises NodeUnavailable if that takes longer, or the owner's refusal."""
        until_s = clock.now_s() + timeout_s
        connection = self._connection(path)
        while not connection.ready:
            left_s = until_s - clock.now_s()
            if left_s <= 0:
                self.cut(path)
                raise NodeUnavailable(f"{path.label} did not answer within {timeout_s:g} s")
            for fd, events in self._epoll.poll(left_s):
                self._greet_step(path, fd, events)

    # --- inside

    def _greet_step(self, path: Path, fd: int, events: int) -> None:
        connection = self._connections[path]
        try:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                connection.advance(self._ended)
            elif fd == connection.descriptors[0]:
                connection.serve_control(events)
        except ConnectionBroken as broken:
            self.cut(path)
            raise broken.error from None
        self._watch(connection)

    def _connection(self, path: Path) -> RdmaConnection:
        connection = self._connections.get(path)
        if connection is not None:
            return connection
        connection = RdmaConnection(
            path, self._devices, self._staging_of(path), self._fences, self._descriptor, self._session_id, self.wake
        )
        control, completions = connection.descriptors
        self._connections[path] = connection
        self._actions[control] = lambda events: self._control_ready(path, events)
        self._actions[completions] = lambda _: self._completion_ready(path)
        self._epoll.register(control, connection.interest)
        connection.watched = connection.interest
        self._epoll.register(completions, select.EPOLLIN)
        return connection

    def _staging_of(self, path: Path) -> Staging:
        staging = self._staging.get(path.local_device)
        if staging is None:
            staging = self._staging[path.local_device] = Staging(self._devices.device(path.local_device))
        return staging

    def _control_ready(self, path: Path, events: int) -> None:
        connection = self._connections.get(path)
        if connection is None:
            return
        try:
            connection.serve_control(events)
        except ConnectionBroken as broken:
            self._break(path, broken.error)

    def _completion_ready(self, path: Path) -> None:
        connection = self._connections.get(path)
        if connection is not None:
            connection.woken()

    def _advance(self) -> None:
        for path, connection in list(self._connections.items()):
            try:
                connection.advance(self._ended)
            except ConnectionBroken as broken:
                self._break(path, broken.error)
            else:
                self._watch(connection)

    def _watch(self, connection: RdmaConnection) -> None:
        if connection.interest != connection.watched:
            self._epoll.modify(connection.descriptors[0], connection.interest)
            connection.watched = connection.interest

    def _arm(self) -> None:
        for connection in self._connections.values():
            connection.arm()

    def _break(self, path: Path, error: TanghuluError) -> None:
        connection = self._connections.get(path)
        had_slices = connection is None or connection.has_slices
        self.cut(path)
        if had_slices:  # an idle queue pair that the owner closed is no event for anybody
            self._broken.add(path)
            self._ended.append(Lost(path, error))
