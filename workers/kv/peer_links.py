"""Connections to other workers, one each, as their sessions: a worker grants leases under a session. Thread-safe.

A failed connection is dropped, and the next use opens another. Its session's mapping remains until the last reading
thread has ended; its unmapping then signals to the other worker that nothing reads its blocks any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog

from tanghulu.auth.certificate_roles import WORKER
from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, PeerSilent, TransferFailed
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.methods import PROTOCOL_VERSION, require_version
from tanghulu.rpc.sockets import SILENT_HOST_S
from tanghulu.runtime.clock import Clock
from tanghulu.runtime.process import host_id
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.transfer_engine.client.remote import RemoteSegment
from tanghulu.transfer_engine.core.segment import SegmentHello, SegmentWelcome
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.types import Address
from tanghulu.workers.kv.peer_methods import HELLO, SHARED_CACHE, SharedCacheRequest

if TYPE_CHECKING:
    import torch

    from tanghulu.workers.kv.device_sharing import DeviceSharing

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

#: Of the first call on a connection.
HELLO_DEADLINE_S = 10.0
#: Seconds without use after which a connection is closed: its worker may have gone, or have another address now.
MAX_IDLE_S = 300.0
#: Seconds of pause for a worker that let a deadline pass: every other caller would wait as long again.
SILENT_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class PeerLink:
    """An open connection and its session's mapping; ``num_readers`` threads use it, and none will once ``dropped``.

    ``cache`` is the worker's, uint8 [blocks, block_bytes], if its blocks are read in place.
    """

    connection: FastConnection
    segment: RemoteSegment
    used_at_s: float
    cache: torch.Tensor | None = None
    num_readers: int = 0
    dropped: bool = False

    @property
    def usable(self) -> bool:
        return not self.dropped and not self.connection.closed and self.segment.alive


@dataclass(slots=True, eq=False)
class _Place:
    """The link to one worker; ``opening`` is held while it is dialled, for which no other worker waits.

    It let a caller wait in vain, and is not called until ``silent_until_s``.
    """

    opening: threading.Lock = field(default_factory=threading.Lock)
    num_waiting: int = 0
    link: PeerLink | None = None
    silent_until_s: float = float("-inf")


def link_of(peer: KvSource | PrefixHolder) -> str:
    """Name the link to ``peer``: ``address|unix path``; the same path on another host is another worker's socket."""
    return f"{peer.address}|{peer.unix_path if peer.host_id == host_id() else ''}"


class PeerLinks:
    """The links to other workers, by their names (see ``link_of``); ``sharing`` opens the caches of this host's."""

    def __init__(
        self,
        engine: TransferEngine,
        client_id: str,
        clock: Clock,
        credentials: Credentials = NOTHING_TO_SHOW,
        sharing: DeviceSharing | None = None,
    ) -> None:
        self._credentials = credentials
        self._sharing = sharing
        self._engine = engine
        self._client_id = client_id
        self._clock = clock
        self._lock = threading.Lock()  # never held while waiting for a peer
        self._places: dict[str, _Place] = {}
        self._closed = False

    def use(self, instance: str, use: Callable[[PeerLink], _T]) -> _T:
        """Call ``use`` with the link to ``instance``, and again with a new one if an old one turns out to be stale.

        Raises what ``use`` raises, and NodeUnavailable or DeadlineExceeded if the worker cannot be reached, or could
        not a moment ago.
        """
        try:
            return self._use_latest(instance, use)
        except (DeadlineExceeded, PeerSilent):
            with self._lock:
                self._places.setdefault(instance, _Place()).silent_until_s = self._clock.now_s() + SILENT_PAUSE_S
            raise

    def use_open(self, instance: str, use: Callable[[PeerLink], None]) -> None:
        """Call ``use`` with the link to ``instance`` if a usable one is open; opens none. Raises what ``use`` does."""
        with self._lock:
            place = self._places.get(instance)
            link = self._lend(place.link) if place is not None else None
        if link is not None:
            self._use(link, use)

    def _use_latest(self, instance: str, use: Callable[[PeerLink], _T]) -> _T:
        link, fresh = self._borrow(instance)
        try:
            return self._use(link, use)
        except NodeUnavailable as error:
            if fresh or isinstance(error, PeerSilent):
                raise
            _log.info("peer.opened_anew", peer=instance, error=error.message)
        return self._use(self._borrow(instance)[0], use)

    def _use(self, link: PeerLink, use: Callable[[PeerLink], _T]) -> _T:
        gone = False
        try:
            return use(link)
        except NodeUnavailable:
            gone = True
            raise
        finally:
            self._give_back(link, spent=gone or link.connection.closed)

    # --- the links

    def _borrow(self, instance: str) -> tuple[PeerLink, bool]:
        """Return the link to ``instance``, for one more reader, and whether it was opened for it."""
        with self._lock:
            if self._closed:
                raise NodeUnavailable("this worker is shutting down and reads no other worker's KV")
            place = self._places.setdefault(instance, _Place())
            place.num_waiting += 1
            stale = self._take_stale()
        self._hang_up(stale)
        try:
            with place.opening:
                with self._lock:
                    if self._clock.now_s() < place.silent_until_s:
                        raise NodeUnavailable(
                            f"worker {instance} did not answer a moment ago; no call for {SILENT_PAUSE_S:g} s"
                        )
                    if (known := self._lend(place.link)) is not None:
                        return known, False
                fresh = self._open(instance)
                with self._lock:
                    place.link, old = fresh, place.link
                    fresh.num_readers += 1
                    gone = self._drop(old, fresh if self._closed else None)
                self._hang_up(gone)
                return fresh, True
        finally:
            with self._lock:
                place.num_waiting -= 1

    def _lend(self, link: PeerLink | None) -> PeerLink | None:
        if link is None or not link.usable:
            return None
        link.num_readers += 1
        link.used_at_s = self._clock.now_s()
        return link

    def _give_back(self, link: PeerLink, *, spent: bool) -> None:
        with self._lock:
            link.num_readers -= 1
            if spent:
                self._drop(link)
        if link.dropped:
            self._hang_up([link])

    def _drop(self, *links: PeerLink | None) -> list[PeerLink]:
        """Stop lending ``links``; return the existing ones, to be closed."""
        there = [link for link in links if link is not None]
        for link in there:
            link.dropped = True
        return there

    def _take_stale(self) -> list[PeerLink]:
        """Forget links of workers that are gone, and those long unused."""
        now_s = self._clock.now_s()
        since_s = now_s - MAX_IDLE_S
        stale: list[PeerLink] = []
        for instance, place in list(self._places.items()):
            link = place.link
            if link is not None and link.num_readers == 0 and (not link.usable or link.used_at_s < since_s):
                stale += self._drop(link)
                place.link = None
            if place.link is None and place.num_waiting == 0 and place.silent_until_s <= now_s:
                del self._places[instance]
        return stale

    def _hang_up(self, links: list[PeerLink]) -> None:
        """Close dropped links; a mapping in use goes with its last reader."""
        for link in links:
            link.connection.close()
            if link.num_readers == 0:
                link.segment.close()
                link.cache = None

    # --- opening

    def _open(self, instance: str) -> PeerLink:
        return self._dial(instance, self._greet)

    def open_apart(self, instance: str) -> FastConnection:
        """Open a connection for the caller alone, who closes it; nothing is mapped under it.

        Raises NodeUnavailable or DeadlineExceeded.
        """
        return self._dial(instance, self._introduce)

    def _introduce(self, connection: FastConnection, shown: Credentials) -> FastConnection:
        self._hello(connection, shown, wants_shm=False)
        return connection

    def _dial(self, instance: str, greet: Callable[[FastConnection, Credentials], _T]) -> _T:
        address, _, unix_path = instance.partition("|")
        at = Address.parse(address)
        connection = FastConnection(at, unix_path or None, tls=self._credentials.tls.to(WORKER), dead_s=SILENT_HOST_S)
        try:
            return greet(connection, self._credentials.to(at, unix_path))
        except BaseException:  # including an interrupt: nothing else would close it; re-raised
            connection.close()
            raise

    def _greet(self, connection: FastConnection, shown: Credentials) -> PeerLink:
        reply = self._hello(connection, shown, wants_shm=True)
        cache = self._open_cache(connection)
        segment = self._engine.open_segment(reply.segment, reply.session)
        return PeerLink(connection, segment, self._clock.now_s(), cache)

    def _open_cache(self, connection: FastConnection) -> torch.Tensor | None:
        """Open the cache that the worker shares; None if there is none, or the driver refuses."""
        if self._sharing is None:
            return None
        reply = connection.call(
            SHARED_CACHE.number, SharedCacheRequest(), SHARED_CACHE.reply, deadline_s=HELLO_DEADLINE_S
        )
        shared = reply.message.cache
        if shared is None:
            return None
        try:
            cache = self._sharing.open(shared)
        except TransferFailed as error:
            _log.info("peer.cache_not_opened", peer=connection.peer, error=error.message, instead="its segment")
            return None
        _log.info("peer.cache_opened", peer=connection.peer, device=shared.device_uuid)
        return cache

    def _hello(self, connection: FastConnection, shown: Credentials, *, wants_shm: bool) -> SegmentWelcome:
        hello = SegmentHello(PROTOCOL_VERSION, shown.tenant, shown.token, self._client_id, host_id(), wants_shm)
        reply = connection.call(HELLO.number, hello, HELLO.reply, deadline_s=HELLO_DEADLINE_S)
        require_version(reply.message.protocol_version, connection.peer)
        return reply.message

    def close(self) -> None:
        """Disconnect from all workers; reads under way fail."""
        with self._lock:
            self._closed = True
            links = self._drop(*[place.link for place in self._places.values()])
            self._places.clear()
        self._hang_up(links)


#: Interval at which connections with a read under way are checked.
LOOK_S = 0.5


class SilenceWatch:
    """Watches connections from a thread of its own, as long as there are any. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[object, tuple[FastConnection, Callable[[], None], list[NodeUnavailable]]] = {}
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @contextlib.contextmanager
    def over(self, connection: FastConnection, cancel: Callable[[], None]) -> Iterator[list[NodeUnavailable]]:
        """Call ``cancel``, from another thread, if ``connection`` is lost inside the block; yields a list for why."""
        key, reasons = object(), list[NodeUnavailable]()
        with self._lock:
            self._watched[key] = connection, cancel, reasons
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="peer silence", daemon=True)
                self._thread.start()
        try:
            yield reasons
        finally:
            with self._lock:
                del self._watched[key]

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                watched = list(self._watched.values())
                if not watched:
                    self._thread = None
                    return
            for connection, cancel, reasons in watched:
                reason = connection.failure()
                if reason is not None:
                    reasons.append(reason)
                    cancel()
