"""Interface of a transport to the engine, at both ends. Owns the protocols that a transport fulfils, and no decision.

A transport is a folder of ``transports/`` whose module ``transport`` offers what ``Transport`` lists; the registry
there names it. The client gets from it a *peer* (a remote segment as that transport reaches it), the owner for a
*listener*.

A *link* is one set of connections to one peer, lent to one batch at a time (like a connection of an HTTP pool): so a
batch that gives up closes only its own connections, and no lock is held while bytes move. Several threads use a peer at
once through several links. A link's own connections serve several paths (streams, devices). Links post and poll, and
take no decision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, cast

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.config import EngineConfig, ListenOptions, ServerLimits, TransportLimits
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.segment import Endpoint, MemorySegment, SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.topology.devices import Topology

T = TypeVar("T")
#: Tokens that are kept; a connection given up longer ago has long been read to its end or reset.
MAX_TOKENS = 1024


class Fences:
    """Tokens of connections to one peer that were given up with a WRITE on them; thread-safe.

    Every stream to that peer, old or new, sends those it has not yet reported before its next slice; the peer cuts them
    (see ``wire``). So anything this process does to the segment after giving up a connection is served after the peer
    has stopped reading that connection: a retry, and also the next batch.
    """

    def __init__(self) -> None:
        self.num_added = 0
        self._tokens: list[int] = []
        self._lock = threading.Lock()

    def add(self, token: int) -> None:
        """Record that the connection of ``token`` was closed while the peer may still be writing from it."""
        with self._lock:
            self._tokens.append(token)
            self.num_added += 1
            if len(self._tokens) > MAX_TOKENS:
                del self._tokens[0]

    def since(self, num_seen: int) -> tuple[int, list[int]]:
        """Return (number added so far, those after the first ``num_seen`` that are still kept)."""
        with self._lock:
            missing = min(self.num_added - num_seen, len(self._tokens))
            return self.num_added, self._tokens[len(self._tokens) - missing :]


# --- outcomes of slices


class Arrived(NamedTuple):
    """All bytes of the slice are in place."""

    slice_id: int


class Refused(NamedTuple):
    """The peer answered the slice with a typed error and touched nothing."""

    slice_id: int
    error: TanghuluError


class Lost(NamedTuple):
    """The path broke with slices on it; none of their bytes will land in local memory any more."""

    path: Path
    error: TanghuluError


class Corrupt(NamedTuple):
    """All bytes of a verified slice have arrived, but differ from those sent."""

    slice_id: int
    error: TanghuluError


Completion = Arrived | Refused | Lost | Corrupt


class ConnectionBroken(Exception):
    """A link's connection cannot be used any more; ``error`` explains it in the caller's terms."""

    def __init__(self, error: TanghuluError) -> None:
        super().__init__(error.message)
        self.error = error


# --- client side


class Link(Protocol):
    """One batch's connections to one peer on one transport; used by one thread at a time, except ``wake``."""

    def greet(self, path: Path, timeout_s: float, clock: Clock) -> None:
        """Make sure, before any slice, that the owner serves the segment over ``path``.

        Raises NodeUnavailable, also after ``timeout_s``, or the owner's refusal.
        """

    def post(self, piece: Slice, path: Path) -> None:
        """Start moving the slice over ``path``. Never blocks on the peer and never raises: failures are completions."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """Move bytes; return what ended. Waits at most ``timeout_s`` for an event."""

    def cut(self, path: Path) -> None:
        """Close the path's connection; its slices are forgotten without a completion, and no byte of them lands locally
        afterwards. A later post connects anew.
        """

    @property
    def reusable(self) -> bool:
        """Whether another batch may use it: nothing is under way."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``poll`` has work; -1 when everything ends inside ``post``."""

    def wake(self) -> None:
        """End a ``poll`` waiting in another thread."""

    def close(self) -> None:
        """Close every connection."""

    def check(self) -> None:
        """Assert the invariants of its connections."""


class TransportPeer(Protocol):
    """A remote segment as one transport reaches it: makes links."""

    def paths(self, rank: int) -> list[Path]:
        """Return every path of this transport to the segment; ``rank`` for preferred ones, ``rank + 1`` for others."""

    def connect(self) -> Link:
        """Return a new link; does not wait for the peer."""

    def close(self) -> None:
        """Release everything shared by the links."""


class SharedResources:
    """State kept by an engine's transports from one segment to the next, such as open devices; ends with the engine.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._kept: dict[str, object] = {}
        self._ends = ExitStack()
        self._closed = False
        self._lock = threading.Lock()

    def get(self, name: str, make: Callable[[], T], end: Callable[[T], None]) -> T:
        """Return the result of ``make`` from the first call for ``name``; ``close`` calls ``end`` with it.

        Raises what ``make`` raises, and the next call tries again; NodeUnavailable after ``close``.
        """
        with self._lock:
            if self._closed:
                raise NodeUnavailable("the transfer engine is closed")
            if name not in self._kept:
                made = self._kept[name] = make()
                self._ends.callback(end, made)
            return cast(T, self._kept[name])

    def close(self) -> None:
        """End everything that was made."""
        with self._lock:
            self._closed = True
            self._kept.clear()
            self._ends.close()


@dataclass(frozen=True, slots=True)
class ConnectContext:
    """A segment to be opened, and by whom: everything a transport needs to reach it.

    ``fences`` are sent over all transports to that segment. ``host_id`` is this process's.
    """

    descriptor: SegmentDescriptor
    session: SessionKey
    config: EngineConfig
    host_id: str = ""
    fences: Fences = field(default_factory=Fences)
    shared: SharedResources = field(default_factory=SharedResources)

    def endpoints(self, transport: str) -> Sequence[Endpoint]:
        """Return the segment's endpoints of one transport."""
        return self.descriptor.endpoints_of(transport)


# --- owner side


class Listener(Protocol):
    """One transport's access to a segment, on the owner's event loop."""

    async def start(self) -> None:
        """Listen. Raises OSError if an address is taken, NodeUnavailable if the transport does not work here.

        After an error nothing is left behind.
        """

    def endpoints(self) -> Sequence[Endpoint]:
        """Return the endpoints for the descriptor; valid after ``start``."""

    @property
    def num_connections(self) -> int:
        """Open connections of peers."""

    async def close(self) -> None:
        """Disconnect every peer; afterwards nothing lands in the segment through this transport."""

    def check(self) -> None:
        """Assert the invariants of its connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContext:
    """A segment to be offered: everything a transport needs to serve it.

    ``access`` decides about every range; None lets every peer touch everything. ``admission`` admits connections, and
    cuts them when they stall. ``on_freed`` receives the freed ranges. ``watch_process`` takes a session's number and a
    pidfd, which it then owns: the end of that process ends the session. ``on_hang_up`` receives the session of a peer
    that had mapped the segment and has closed its connection.
    """

    segment: MemorySegment
    access: AccessTable | None
    generation: int
    admission: PeerAdmission
    listen: ListenOptions
    limits: ServerLimits
    on_freed: Callable[[Sequence[Freed]], None]
    watch_process: Callable[[int, int], None]
    on_hang_up: Callable[[int], None]


# --- both


class Ability(NamedTuple):
    """Whether a transport works on this machine, and what it would use or lacks."""

    works: bool
    note: str


class Transport(Protocol):
    """A transport; the modules ``transports/*/transport.py`` are its instances."""

    #: Slices that suit it.
    LIMITS: TransportLimits

    def connect(self, context: ConnectContext) -> TransportPeer:
        """Reach a segment whose descriptor has an endpoint of this transport.

        Waits at most as long as configured. Raises NodeUnavailable if that is impossible from this process, or the
        owner's refusal.
        """

    def serve(self, context: ServeContext) -> Listener:
        """Return a listener that offers the segment; ``Listener.start`` starts it."""

    def probe(self, topology: Topology) -> Ability:
        """Find out by trying what this machine can do; leaves nothing behind. Raises OSError, TanghuluError."""
