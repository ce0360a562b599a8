"""SegmentServer: one process's segment, offered to peers over shm and tcp.

Owns the listeners, their connections, the counters, and the sweep that cuts connections stuck inside a slice. What a
peer may touch is ``access``'s decision; how bytes move is ``tcp_server``'s and the peer's own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tanghulu.errors import InvalidRequest, NodeUnavailable, TanghuluError, Unauthorized
from tanghulu.transfer_engine.access import AccessTable
from tanghulu.transfer_engine.leases import Freed
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.segment import Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.shm_server import ProcessWatch, ShmDoor
from tanghulu.transfer_engine.tcp_server import TcpConnection
from tanghulu.transfer_engine.wire import Head, Op, name_hash
from tanghulu.types import Address, LeaseId

#: A slice without a byte of progress for this long has its connection closed, so that its range can be reused.
STALL_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 1024
_MAX_FENCED_TOKENS = 1 << 16
_PIECE_BYTES = 1 << 20
_BACKLOG = 1024


class SegmentServer:
    """Serves ``segment`` until ``close()``; everything happens on the event loop that called ``start()``.

    ``access`` decides about every range; None opens the whole segment to everybody who can connect (tests, benches).
    ``on_freed`` is told, on the loop, which ranges became free because a transfer ended or a peer's process exited.
    ``unix_path=None`` offers no shm. ``advertised_host`` (by default ``host``) is what the descriptor tells peers.
    ``bytes_read`` and ``bytes_written`` count by transport, from the client's point of view; shm traffic is invisible
    here, so the owner adds what its clients report. The segment stays the caller's; close the server first.
    """

    def __init__(
        self,
        segment: MemorySegment,
        access: AccessTable | None,
        *,
        host: str,
        port: int = 0,
        unix_path: str | None,
        generation: int,
        host_id: str,
        name: str | None = None,
        on_freed: Callable[[Sequence[Freed]], None] | None = None,
        advertised_host: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        assert name is None or name == segment.name, "a segment is offered under its own name"
        self.view = segment.view
        self.piece_bytes = _PIECE_BYTES
        self.bytes_read = {"shm": 0, "tcp": 0}
        self.bytes_written = {"shm": 0, "tcp": 0}
        self.num_refused = 0
        self._segment = segment
        self._access = access
        self._host, self._port, self._unix_path = host, port, unix_path
        self._advertised_host = advertised_host or host
        self._generation = generation
        self._host_id = host_id
        self._name_hash = name_hash(segment.name)
        self._on_freed = on_freed
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        self._connections: set[TcpConnection] = set()
        self._by_token: dict[int, TcpConnection] = {}
        self._fenced: OrderedDict[int, None] = OrderedDict()
        self._listener: asyncio.Server | None = None
        self._door: ShmDoor | None = None
        self._watch = ProcessWatch(self._process_exited)
        self._sweeping: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    # --- life

    async def start(self) -> None:
        """Listen on every transport; raises OSError if an address or the socket path is taken."""
        assert self._listener is None, "a server starts once"
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: TcpConnection(self), self._host, self._port, backlog=_BACKLOG)
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._unix_path is not None:
            self._door = ShmDoor(
                self._segment, self._access, self._unix_path, self._generation, self._watch, self._max_connections
            )
            try:
                await self._door.start()
            except BaseException:
                self._listener.close()
                raise
        self._sweeping = loop.call_later(self._stall_timeout_s, self._sweep)

    def descriptor(self) -> SegmentDescriptor:
        """What peers need in order to open this segment; valid after ``start()``."""
        assert self._listener is not None, "start the server first"
        endpoints = [Endpoint("tcp", str(Address(self._advertised_host, self._port)))]
        if self._unix_path is not None:
            endpoints.insert(0, Endpoint("shm", self._unix_path))
        return SegmentDescriptor(
            self._segment.name, self._segment.size_bytes, self._host_id, self._generation, tuple(endpoints)
        )

    async def close(self) -> None:
        """Hang up on all peers and unlink the socket file; no transfer is open when this returns."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        if self._sweeping is not None:
            self._sweeping.cancel()
        listener.close()
        for connection in list(self._connections):
            connection.cut()
        if self._door is not None:
            await self._door.close()
        self._watch.close()
        if self._connections:
            await self._emptied.wait()
        await asyncio.sleep(0)  # ends of READs run one turn behind their connection_lost

    @property
    def num_connections(self) -> dict[str, int]:
        """Open connections by transport."""
        return {"shm": 0 if self._door is None else self._door.num_connections, "tcp": len(self._connections)}

    def check(self) -> None:
        """Assert the invariants: tokens name open connections, and bounds hold."""
        assert set(self._by_token.values()) <= self._connections
        assert len(self._connections) <= self._max_connections
        assert len(self._fenced) <= _MAX_FENCED_TOKENS
        if self._access is not None:
            self._access.check()

    def __repr__(self) -> str:
        return f"SegmentServer({self._segment!r}, generation={self._generation}, {self.num_connections})"

    # --- what a tcp connection asks (TcpDoor)

    def opened(self, connection: TcpConnection) -> bool:
        """Whether there is room for one more connection."""
        if self._listener is None or len(self._connections) >= self._max_connections:
            self.num_refused += 1
            return False
        self._connections.add(connection)
        return True

    def closed(self, connection: TcpConnection) -> None:
        """The connection is gone."""
        self._connections.discard(connection)
        if self._listener is None and not self._connections:
            self._emptied.set()
        self._by_token.pop(connection.token, None)

    def hello(self, connection: TcpConnection, head: Head) -> None:
        """Admit a connection under its token."""
        self._check_generation(head)
        if head.lease_id != self._name_hash:
            raise self._refused(NodeUnavailable(f"another segment is served here: {self._segment.name!r}"))
        token = head.offset
        if token == 0 or token in self._fenced or token in self._by_token or connection.token:
            raise self._refused(Unauthorized(f"connection token {token:#x} is not to be used (again)"))
        connection.token = token
        self._by_token[token] = connection

    def fence(self, head: Head) -> None:
        """Cut the connection that its client gave up, also if its hello comes only later."""
        self._fenced[head.offset] = None
        while len(self._fenced) > _MAX_FENCED_TOKENS:
            self._fenced.popitem(last=False)
        connection = self._by_token.pop(head.offset, None)
        if connection is not None:
            connection.cut()

    def begin(self, head: Head) -> None:
        """Admit a slice: right generation, inside the segment, covered by a lease."""
        self._check_generation(head)
        if head.offset + head.length > self._segment.size_bytes:
            raise self._refused(
                InvalidRequest(
                    f"[{head.offset}, +{head.length}) is outside the segment of {self._segment.size_bytes} bytes"
                )
            )
        if self._access is not None:
            op = Opcode.READ if head.op is Op.READ else Opcode.WRITE
            try:
                self._access.begin(head.session_id, LeaseId(head.lease_id), op, head.offset, head.length)
            except TanghuluError as error:
                raise self._refused(error) from None

    def end(self, head: Head, moved_bytes: int) -> None:
        """A slice ended, wholly moved or not."""
        counter = self.bytes_read if head.op is Op.READ else self.bytes_written
        counter["tcp"] += moved_bytes
        if self._access is not None:
            self._tell(self._access.end(LeaseId(head.lease_id)))

    # --- inside

    def _check_generation(self, head: Head) -> None:
        if head.generation != self._generation:
            raise self._refused(
                NodeUnavailable(
                    f"generation {head.generation} of segment {self._segment.name!r} is gone, "
                    f"{self._generation} is here: ask for its descriptor again"
                )
            )

    def _refused(self, error: TanghuluError) -> TanghuluError:
        self.num_refused += 1
        return error

    def _tell(self, freed: Sequence[Freed]) -> None:
        if freed and self._on_freed is not None:
            self._on_freed(freed)

    def _process_exited(self, session_id: int) -> None:
        if self._access is not None:
            self._tell(self._access.session_exited(session_id))

    def _sweep(self) -> None:
        """Cut connections that made no progress inside a slice since the last sweep; forget ended sessions."""
        for connection in list(self._connections):
            progress = connection.progress
            if progress is not None and progress == connection.sweep_mark:
                connection.cut()
            connection.sweep_mark = progress
        for session_id in self._watch.session_ids:
            if self._access is None or not self._access.has_session(session_id):
                self._watch.forget(session_id)
        self._sweeping = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._sweep)
