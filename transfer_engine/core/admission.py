"""Decisions of a segment's owner about its peers' connections: pure, no socket and no loop.

Owns the connections' tokens, the fences, the counters, and which connections made no progress. ``server`` sweeps;
the transports' listeners move the bytes and consult it; ``access`` decides what a peer may touch. The simulation drives
this very class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from tanghulu.errors import ChecksumMismatch, InvalidRequest, NodeUnavailable, Unauthorized
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.core.wire import MAX_VERIFIED_BYTES, Head, Op, digest_of, name_hash, session_key
from tanghulu.types import LeaseId

_MAX_FENCED_TOKENS = 1 << 16
_MAX_KNOWN_NOTICES = 1 << 16
_PIECE_BYTES = 1 << 20
#: Connections without a HELLO so far; the oldest is closed when another arrives.
MAX_UNKNOWN = 256
# Members as module names: every slice reads them, and an Enum lookup takes ten times as long (Python 3.11).
_READ, _WRITE, _READ_HEAD = Opcode.READ, Opcode.WRITE, Op.READ


class Connection(Protocol):
    """Operations required of a peer's connection, on any transport but shm."""

    token: int
    sweep_mark: tuple[int, int] | None

    @property
    def progress(self) -> tuple[int, int] | None:
        """(slice id, bytes moved) of the slice in work, None when there is none."""

    def cut(self) -> None:
        """Close at once: nothing is received into the segment after this call."""


#: Takes (session id, the peer's message); called once for each notice, after all of its bytes have landed.
OnNotice = Callable[[int, bytes], None]


class PeerAdmission:
    """Admission of peers, and of their slices, to one segment of one generation.

    ``soon`` runs a callback after the current event (the loop's ``call_soon``); ``on_freed`` receives the ranges freed
    by the end of a transfer, ``on_emptied`` is called when the last connection has gone while it was not ``open``.
    While it is not, no new connection is admitted. Without ``on_notice`` notices are refused. Refusals are raised as
    typed errors; connections count those that they answer in ``num_refused``.
    """

    def __init__(
        self,
        segment: MemorySegment,
        access: AccessTable | None,
        *,
        generation: int,
        max_connections: int,
        soon: Callable[[Callable[[], None]], object],
        on_freed: Callable[[Sequence[Freed]], None] | None = None,
        on_emptied: Callable[[], None] | None = None,
        on_notice: OnNotice | None = None,
    ) -> None:
        self.view = segment.view
        self.piece_bytes = _PIECE_BYTES
        self.soon = soon
        self.bytes_read = 0
        self.bytes_written = 0
        self.num_refused = 0
        self.num_fenced = 0
        self.num_notices = 0
        self.num_mismatches = 0
        self.open = False
        self.connections: set[Connection] = set()
        #: Connections without a HELLO, the oldest first, and whether they were checked before.
        self._unknown: OrderedDict[Connection, bool] = OrderedDict()
        self._segment = segment
        self._access = access
        self._generation = generation
        self._name_hash = name_hash(segment.name)
        self._max_connections = max_connections
        self._on_freed = on_freed
        self._on_emptied = on_emptied
        self._on_notice = on_notice
        self._notices: OrderedDict[int, None] = OrderedDict()  # numbers of the newest
        self._size_bytes = segment.size_bytes
        self._by_token: dict[int, Connection] = {}
        self._fenced: OrderedDict[int, None] = OrderedDict()

    # --- for tcp connections

    def opened(self, connection: Connection) -> bool:
        """Return whether there is room for one more connection."""
        if not self.open or len(self.connections) >= self._max_connections:
            self.num_refused += 1
            return False
        self.connections.add(connection)
        self._unknown[connection] = False
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)[0].cut()
        return True

    def closed(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        self.connections.discard(connection)
        self._unknown.pop(connection, None)
        self._by_token.pop(connection.token, None)
        if not self.open and not self.connections and self._on_emptied is not None:
            self._on_emptied()

    def hello(self, connection: Connection, head: Head) -> None:
        """Admit a connection under its token, if it has the secret of its session."""
        self._check_generation(head)
        if head.lease_id != self._name_hash:
            raise NodeUnavailable(
                f"this owner serves segment {self._segment.name!r}, not the one named; fetch its descriptor again"
            )
        if self._access is not None:
            self._access.authenticate(session_key(head))
        token = head.offset
        if token == 0 or token in self._fenced or token in self._by_token or connection.token:
            raise Unauthorized(f"connection token {token:#x} was used before; choose another")
        connection.token = token
        self._by_token[token] = connection
        self._unknown.pop(connection, None)

    def fence(self, head: Head) -> None:
        """Cut the connection given up by its client, even if its hello arrives only later."""
        self._fenced[head.offset] = None
        self.num_fenced += 1
        while len(self._fenced) > _MAX_FENCED_TOKENS:
            self._fenced.popitem(last=False)
        connection = self._by_token.pop(head.offset, None)
        if connection is not None:
            connection.cut()

    def begin(self, head: Head) -> None:
        """Admit a slice: right generation, inside the segment, covered by a lease, short enough to be verified."""
        if head.generation != self._generation:
            self._check_generation(head)
        if head.offset + head.length > self._size_bytes:
            raise InvalidRequest(f"[{head.offset}, +{head.length}) is outside the segment of {self._size_bytes} bytes")
        if head.verified and head.length > MAX_VERIFIED_BYTES:
            raise InvalidRequest(
                f"a verified slice has {head.length} bytes, more than {MAX_VERIFIED_BYTES}; use smaller slices"
            )
        if self._access is not None:
            op = _READ if head.op is _READ_HEAD else _WRITE
            self._access.begin(head.session_id, LeaseId(head.lease_id), op, head.offset, head.length)

    def end(self, head: Head, moved_bytes: int) -> None:
        """End a slice, completed or not."""
        if head.op is _READ_HEAD:
            self.bytes_read += moved_bytes
        else:
            self.bytes_written += moved_bytes
        if self._access is not None:
            freed = self._access.end(LeaseId(head.lease_id), moved=moved_bytes == head.length)
            if freed and self._on_freed is not None:
                self._on_freed(freed)

    def digest(self, head: Head) -> int:
        """Return the checksum of the segment's bytes in the head's range."""
        return digest_of(self.view[head.offset : head.offset + head.length])

    def compare(self, head: Head) -> None:
        """Raise ChecksumMismatch if a verified WRITE's range does not hold the bytes sent."""
        found = self.digest(head)
        if found != head.digest:
            self.num_mismatches += 1
            raise ChecksumMismatch(f"{head.length} bytes landed with checksum {found:#x}, sent with {head.digest:#x}")

    def notice(self, head: Head, data: bytes) -> None:
        """Hand a notice to the owner's program unless its number was seen before."""
        self._check_generation(head)
        if self._on_notice is None:
            raise InvalidRequest(f"the owner of {self._segment.name!r} accepts no notices")
        if self._access is not None and not self._access.is_open(head.session_id):
            raise Unauthorized(f"session {head.session_id} is not open; send HELLO first")
        if head.offset in self._notices:
            return
        self._notices[head.offset] = None
        if len(self._notices) > _MAX_KNOWN_NOTICES:
            self._notices.popitem(last=False)
        self.num_notices += 1
        self._on_notice(head.session_id, data)

    # --- for the server

    def cut_stalled(self, least_bytes: int = 1) -> None:
        """Cut connections that moved fewer than ``least_bytes`` since the last call, all of one slice."""
        for connection in list(self.connections):
            progress, before = connection.progress, connection.sweep_mark
            moved_bytes = _moved_bytes(progress, before)
            if moved_bytes is not None and moved_bytes < least_bytes:
                connection.cut()
            connection.sweep_mark = progress

    def cut_unknown(self) -> None:
        """Cut connections that have sent no HELLO, and had not at the last call."""
        for connection, seen in list(self._unknown.items()):
            self._unknown[connection] = True
            if seen:
                connection.cut()

    def check(self) -> None:
        """Assert the invariants: tokens name open connections, and bounds hold."""
        assert set(self._by_token.values()) <= self.connections
        assert len(self.connections) <= self._max_connections
        assert set(self._unknown) <= self.connections
        assert len(self._unknown) <= MAX_UNKNOWN
        assert len(self._fenced) <= _MAX_FENCED_TOKENS
        assert len(self._notices) <= _MAX_KNOWN_NOTICES
        assert not self._by_token.keys() & self._fenced.keys()
        if self._access is not None:
            self._access.check()

    def __repr__(self) -> str:
        return f"PeerAdmission({self._segment!r}, generation={self._generation}, {len(self.connections)} connections)"

    # --- inside

    def _check_generation(self, head: Head) -> None:
        if head.generation != self._generation:
            raise NodeUnavailable(
                f"generation {head.generation} of segment {self._segment.name!r} has ended, "
                f"{self._generation} is served now; fetch its descriptor again"
            )


def _moved_bytes(progress: tuple[int, int] | None, before: tuple[int, int] | None) -> int | None:
    """Return the bytes moved since then, of the same slice in work; None if there is another, or none."""
    if progress is None or before is None or progress[0] != before[0]:
        return None
    return abs(progress[1] - before[1])
