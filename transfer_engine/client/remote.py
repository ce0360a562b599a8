"""A remote segment as this process reaches it: its paths, its links, its mapping.

Owns everything opened per peer. ``core.paths`` decides which path a slice takes, the engine who may use a
RemoteSegment. ``LinkPool`` keeps the links that wait for the next batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.runtime.tasks import undo_on_error
from tanghulu.transfer_engine.core.paths import NOTICE_TRANSPORT, Path, PathState, PathStats, PathTable, PauseRule
from tanghulu.transfer_engine.core.transport import ConnectContext, Link, TransportPeer
from tanghulu.transfer_engine.transports.registry import TRANSPORTS
from tanghulu.transfer_engine.transports.shm.transport import ShmPeer


class LinkPool:
    """At most ``max_links`` links, each lent to one borrower; thread-safe.

    The link returned last is lent first, so that few stay warm when few are needed. Taking an idle one and giving it
    back are single list operations, without a lock.
    """

    def __init__(self, connect: Callable[[], Link], max_links: int, clock: Clock) -> None:
        self._connect: Callable[[], Link] | None = connect  # None once closed
        self._max_links = max_links
        self._clock = clock
        self._idle: list[Link] = []
        self._num_links = 0  # idle, lent, or being made
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def borrow(self, until_s: float | None) -> Link | None:
        """Return a link, or None when all are lent until ``until_s`` (clock seconds; None does not wait).

        Raises NodeUnavailable if the pool is closed.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return self._borrow_slowly(until_s)

    def give_back(self, link: Link, *, idle: bool = False) -> None:
        """Return a borrowed link; it is closed if something is still under way on it or the pool is closed.

        ``idle``: the caller knows that nothing is under way.
        """
        if idle or link.reusable:
            self._idle.append(link)
            if self._connect is None:
                self._close_idle()
            elif self._num_waiting:
                with self._lock:
                    self._changed.notify()
        else:
            self._forget()
            link.close()

    def put(self, link: Link) -> None:
        """Add a link made elsewhere (the one that greeted the peer)."""
        with self._lock:
            self._num_links += 1
        self.give_back(link)

    def close(self) -> None:
        """Close the idle links now and the lent ones when they are returned."""
        with self._lock:
            self._connect = None  # drops the state shared by the links
            self._changed.notify_all()
        self._close_idle()

    def check(self) -> None:
        """Assert the invariants: bounds hold, and idle links have nothing under way."""
        with self._lock:
            assert len(self._idle) <= self._num_links
            assert self._connect is not None or not self._idle
            assert all(link.reusable for link in self._idle)
            for link in self._idle:
                link.check()

    # --- inside

    def _borrow_slowly(self, until_s: float | None) -> Link | None:
        with self._lock:
            self._num_waiting += 1  # before the next look at the idle ones: whoever returns one after that wakes us
            try:
                while True:
                    connect = self._connect
                    if connect is None:
                        raise NodeUnavailable("the segment was closed in this process; open it again")
                    if self._idle:
                        with contextlib.suppress(IndexError):  # another thread took it without the lock
                            return self._idle.pop()
                    if self._num_links < self._max_links:
                        self._num_links += 1
                        break
                    left_s = 0.0 if until_s is None else until_s - self._clock.now_s()
                    if left_s <= 0:
                        return None
                    self._changed.wait(left_s)
            finally:
                self._num_waiting -= 1
        with undo_on_error(self._forget):
            return connect()

    def _forget(self) -> None:
        """Count one link less, so that another may be made."""
        with self._lock:
            self._num_links -= 1
            self._changed.notify()

    def _close_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(IndexError):
                link = self._idle.pop()
                self._forget()
                link.close()


#: A transport's paths take two ranks: the second for devices that are not preferred.
_RANKS_EACH = 2


class RemoteSegment:
    """An open segment, made by ``TransferEngine.open_segment``. Thread-safe.

    ``transport`` names the preferred one (if pinned, the only one), the first of ``peers``.
    """

    def __init__(self, context: ConnectContext, peers: Mapping[str, TransportPeer], clock: Clock) -> None:
        """``peers`` are the same segment by transport; this object owns them until ``close``."""
        assert peers, "a segment is reached over at least one transport"
        config = context.config
        self.descriptor = context.descriptor
        self.session_id = context.session.session_id
        self.size_bytes = self.descriptor.size_bytes
        self.transport = next(iter(peers))
        #: Mapped memory, if the segment can be reached that way: the fast path copies without a link.
        self.shm = next((each for each in peers.values() if isinstance(each, ShmPeer)), None)
        self._peers = dict(peers)
        if NOTICE_TRANSPORT not in peers:
            self._peers[NOTICE_TRANSPORT] = TRANSPORTS[NOTICE_TRANSPORT].connect(context)
        self._pools = {
            name: LinkPool(peer.connect, config.max_links_per_peer, clock) for name, peer in self._peers.items()
        }
        rule = PauseRule(config.pause_after_errors, config.pause_s, config.pause_max_s)
        self.paths = PathTable(_all_paths(context, peers), rule)
        #: The links that serve each path.
        self.pools = {path: self._pools[path.transport] for path in self.paths.paths}
        #: Whether ``close()`` has been called.
        self.closed = False

    @property
    def name(self) -> str:
        """The segment's name."""
        return self.descriptor.name

    def map(self) -> memoryview | None:
        """Return the segment's memory itself when the transport is shm, else None; for views without a copy.

        Read-only, of format ``B``, valid until ``close()``; its slices keep the pages mapped longer. Read only ranges
        on which a lease with ``shm`` is held, and verify checksums: the owner may be gone.
        """
        shm = self.shm
        return shm.view if shm is not None else None

    def map_writable(self) -> memoryview | None:
        """Return the segment's bytes, mapped a second time for writing; None where this process may only read."""
        shm = self.shm
        return shm.writable_view if shm is not None else None

    def map_published(self) -> memoryview | None:
        """Return the area that the owner publishes beside the segment, where it is mapped; read-only."""
        shm = self.shm
        return shm.published if shm is not None else None

    def touch(self, offset: int, length: int) -> None:
        """Prepare that range of ``map_writable()`` for a write by the caller: cheaper than a fault for each page."""
        if self.shm is not None:
            self.shm.touch(offset, length)

    @property
    def alive(self) -> bool:
        """Whether the segment is open and, under shm, its owner still keeps the connection; over tcp, just open."""
        shm = self.shm
        return not self.closed and (shm is None or shm.alive)

    def greet(self, timeout_s: float, clock: Clock) -> None:
        """Make sure that an endpoint of the preferred transport serves this segment.

        Raises NodeUnavailable or the endpoint's refusal.
        """
        errors: list[TanghuluError] = []
        for path in self.paths.paths:
            if path.transport != self.transport or path.stream:
                continue
            link = self._peers[path.transport].connect()
            try:
                link.greet(path, timeout_s, clock)
            except TanghuluError as error:
                link.close()
                errors.append(error)
                continue
            self._pools[self.transport].put(link)
            return
        raise errors[0] if errors else NodeUnavailable(f"segment {self.name!r} has no {self.transport} endpoint")

    def close(self) -> None:
        """Release the peer, for everybody who opened this segment. Batches in flight fail or end by themselves."""
        if self.closed:
            return
        self.closed = True
        for pool in self._pools.values():
            pool.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self.shm = None

    def path_stats(self) -> list[tuple[Path, PathState, PathStats]]:
        """Return every path with its presumed state and its statistics, as of now."""
        return [(path, self.paths.state(path), self.paths.stats(path)) for path in self.paths.paths]

    def check(self) -> None:
        """Assert the invariants of everything it owns."""
        self.paths.check()
        for pool in self._pools.values():
            pool.check()

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"RemoteSegment({self.name!r}, generation={self.descriptor.generation}, {self.transport}{closed})"


def _all_paths(context: ConnectContext, transports: Mapping[str, TransportPeer]) -> list[Path]:
    """Return every path of every transport, ranked by their order; those for notices alone come last."""
    paths: list[Path] = []
    if NOTICE_TRANSPORT not in transports:
        last = _RANKS_EACH * len(transports)
        paths = [Path(each, "", 0, last, notices_only=True) for each in context.endpoints(NOTICE_TRANSPORT)]
    for number, peer in enumerate(transports.values()):
        paths += peer.paths(_RANKS_EACH * number)
    return paths
