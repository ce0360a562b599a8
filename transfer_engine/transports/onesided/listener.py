"""Serving side of the transports that bypass the owner's process: every control connection gets an end.

Owns the listener and the state that lives as long as a connection; bytes move without it. An *end* is the transport's
access to the segment, a queue pair or an agent (``FarEnds`` makes them). ``admission`` decides who is admitted and
which connections their clients have given up, as for tcp; ``access`` decides which sessions' ends must go because a
lease has run out. An end is closed before that is reported: before a FENCE or CLOSE is answered, and before
``end_one_sided`` frees a range.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

from tanghulu.auth.handshakes import Handshakes
from tanghulu.errors import LeaseExpired, Overloaded, TanghuluError
from tanghulu.runtime.tasks import undo_on_error
from tanghulu.transfer_engine.core.segment import Endpoint
from tanghulu.transfer_engine.core.transport import ServeContext
from tanghulu.transfer_engine.core.wire import Head, MalformedMessage, Op, OtherVersion
from tanghulu.transfer_engine.transports.onesided.wire import ControlAnswer, ControlOp, ControlRequest, Dialect
from tanghulu.types import Address, LeaseId

_BACKLOG = 256
#: Most bytes that a client may send before its end is up: it needs only a few requests.
_MAX_UNSERVED_BYTES = 8192
_TOKEN_OPS = (ControlOp.CONNECT, ControlOp.FENCE, ControlOp.CLOSE)
_DIGEST_OPS = (ControlOp.READ, ControlOp.WRITTEN)


class FarEnd(Protocol):
    """Owner's end of one client's connection: bytes reach the segment through it while it is open."""

    def close(self) -> None:
        """Close it: nothing lands and nothing is sent through it any more when this returns."""


class Grant(NamedTuple):
    """An end made for one client, and the answer to that client (see ``wire``)."""

    end: FarEnd
    payload: bytes


class FarEnds(Protocol):
    """Makes the ends of one transport to one segment."""

    dialect: Dialect
    #: Most connections at once.
    max_ends: int

    @property
    def devices(self) -> Sequence[str]:
        """Names of the serving devices, in the order of preference; one empty name if irrelevant."""

    async def start(self) -> None:
        """Acquire the devices and the segment. Raises NodeUnavailable, TransferFailed."""

    def admit(self, connect_payload: bytes) -> None:
        """Raise the typed refusal if no end can be made for such a CONNECT; MalformedMessage."""

    async def make(self, token: int, connect_payload: bytes, take: Callable[[Grant], None]) -> None:
        """Hand ``take`` an end, made in a thread; its resources stay open until ``take`` has returned.

        Raises NodeUnavailable, TransferFailed, and what ``take`` raises.
        """

    def close(self) -> None:
        """Release the segment and the devices; every end is closed already."""


class OneSidedListener:
    """Serves a segment through ``ends``; everything but making ends happens on one event loop."""

    def __init__(self, ends: FarEnds, context: ServeContext) -> None:
        self.ends = ends
        self.connections: set[OneSidedServerConnection] = set()
        self.admission = context.admission
        self._access = context.access
        self._on_freed = context.on_freed
        self._listen, self._hello_s = context.listen, context.limits.hello_s
        self._handshakes: Handshakes | None = None
        self._listener: asyncio.Server | None = None
        self._also_revoke: Callable[[int], None] | None = None
        self._port = 0

    # --- life

    async def start(self) -> None:
        """Listen. Raises what ``FarEnds.start`` raises, and OSError."""
        await self.ends.start()
        loop = asyncio.get_running_loop()
        with undo_on_error(self.ends.close):
            make: Callable[[], asyncio.BaseProtocol] = partial(OneSidedServerConnection, self)
            if self._listen.tls is not None:
                make = self._handshakes = Handshakes(self._listen.tls, make, self._hello_s)
            self._listener = await loop.create_server(make, self._listen.host, 0, backlog=_BACKLOG)
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._access is not None:
            self._also_revoke = self._access.on_revoke
            self._access.on_revoke = self._revoke_soon

    def endpoints(self) -> list[Endpoint]:
        """Return one per device, in the order of preference."""
        address = str(Address(self._listen.announced_host, self._port))
        return [Endpoint(self.ends.dialect.protocol, address, name) for name in self.ends.devices]

    @property
    def num_connections(self) -> int:
        """Open control connections."""
        return len(self.connections)

    async def close(self) -> None:
        """Close every end, then release the memory and the devices; all of it before anything else runs."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._handshakes is not None:
            self._handshakes.close()
        for connection in list(self.connections):
            connection.cut()
        self.ends.close()
        if self._access is not None:
            self._access.on_revoke = self._also_revoke

    def check(self) -> None:
        """Assert the invariants: a connection has an end exactly while it is admitted."""
        for connection in self.connections:
            connection.check()

    # --- for a connection

    def admit(self, connection: OneSidedServerConnection, request: ControlRequest) -> None:
        """Admit the connection to an end; raises the typed refusal."""
        if len(self.connections) > self.ends.max_ends:
            name = self.ends.dialect.protocol
            raise Overloaded(f"{self.ends.max_ends} {name} connections are open; use another transport")
        self.ends.admit(request.payload)
        first, second = request.offset, request.length
        head = Head(
            Op.HELLO, 0, request.session_id, request.name_hash, request.generation, request.number, first, digest=second
        )
        self.admission.hello(connection, head)

    def begun(self, session_id: int) -> None:
        """Count an end of the session that serves from now on; ``ended`` follows. Raises InvalidRequest."""
        if self._access is not None:
            self._access.begin_one_sided(session_id)

    def ended(self, session_id: int) -> None:
        """Count an end of the session as closed."""
        if self._access is not None:
            freed = self._access.end_one_sided(session_id)
            if freed:
                self._on_freed(freed)

    def fence(self, token: int) -> None:
        """Cut the connection given up by its client, even if it arrives only later."""
        self.admission.fence(Head(Op.FENCE, 0, 0, 0, 0, token, 0))

    def admit_lease(self, session_id: int, lease_id: int) -> None:
        """Raise LeaseExpired if the session may not use the lease now; when it is lost later, ``_revoke`` follows."""
        if self._access is None:
            return
        lease = self._access.lease(LeaseId(lease_id))
        if lease is None or lease.session_id != session_id or not self._access.is_active(lease.lease_id):
            raise LeaseExpired(f"session {session_id} has no lease {lease_id}; reserve or pin again")

    def digest(self, connected: ControlRequest, request: ControlRequest) -> int:
        """Return the checksum of a range that ``connected``'s client may read or has written; raises the refusal."""
        op = Op.READ if request.op is ControlOp.READ else Op.WRITE
        head = Head(
            op, 0, connected.session_id, request.number, connected.generation, request.offset, request.length, True
        )
        self.admission.begin(head)
        try:
            return self.admission.digest(head)
        finally:
            self.admission.end(head, 0)

    @property
    def leased(self) -> bool:
        """Whether leases are kept."""
        return self._access is not None

    # --- inside

    def _revoke_soon(self, session_id: int) -> None:
        asyncio.get_running_loop().call_soon(self._revoke, session_id)
        if self._also_revoke is not None:
            self._also_revoke(session_id)

    def _revoke(self, session_id: int) -> None:
        for connection in list(self.connections):
            if connection.session_id == session_id:
                connection.cut()


class OneSidedServerConnection(asyncio.Protocol):
    """One client's control connection and the end that lives as long."""

    def __init__(self, listener: OneSidedListener) -> None:
        self.token = 0
        self.sweep_mark: tuple[int, int] | None = None
        self._listener = listener
        self._dialect = listener.ends.dialect
        self._connected: ControlRequest | None = None
        self._end: FarEnd | None = None
        self._making: asyncio.Task[None] | None = None
        self._stranger = False  # has been informed that it speaks another version; ignored from then on
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._admitted = False
        self._writable = True

    @property
    def session_id(self) -> int:
        """Session of the client, once it is admitted."""
        return 0 if self._connected is None else self._connected.session_id

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse the peer when the server is full."""
        self._transport = cast(asyncio.Transport, transport)
        self._admitted = self._listener.admission.opened(self)
        if self._admitted:
            self._listener.connections.add(self)
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release a client that is gone or was cut."""
        self._transport = None
        self._close_end()
        if self._admitted:
            self._admitted = False
            self._listener.connections.discard(self)
            self._listener.admission.closed(self)

    def data_received(self, data: bytes) -> None:
        """Serve whole requests, in order; those behind a CONNECT wait for its end."""
        if self._stranger:
            return
        self._data += data
        self._serve_whole()
        if self._making is not None and len(self._data) > _MAX_UNSERVED_BYTES:
            self.cut()

    def pause_writing(self) -> None:
        """Serve and receive no request until the client has received its answers."""
        self._writable = False
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._writable = True
        self.sweep_mark = None  # this was progress
        self._serve_whole()

    def _serve_whole(self) -> None:
        """Serve whole requests, at most one digest at a turn of the loop: each may read 64 MiB."""
        try:
            while self._transport is not None and self._open and self._making is None and self._writable:
                request = self._dialect.take_request(self._data)
                if request is None:
                    self._transport.resume_reading()
                    return
                self._serve(request)
                if request.op in _DIGEST_OPS and self._data and self._writable:
                    self._transport.pause_reading()
                    asyncio.get_running_loop().call_soon(self._serve_whole)
                    return
        except MalformedMessage as error:
            self._turn_away(error)

    # --- for the admission

    @property
    def progress(self) -> tuple[int, int] | None:
        """None, unless a peer of another version does not disconnect, or a client does not receive its answers."""
        return (-1, 0) if self._stranger or not self._writable else None

    def cut(self) -> None:
        """Close the end, now, and disconnect. An end still being made is closed unused."""
        self._close_end()
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """Assert the invariants."""
        assert self._end is None or self.token
        assert self._admitted or self._end is None

    # --- inside

    def _serve(self, request: ControlRequest) -> None:
        if request.number == 0 and request.op in _TOKEN_OPS:
            raise MalformedMessage("a token is not 0")
        if (request.op is ControlOp.CONNECT) == (self.token != 0):
            raise MalformedMessage("a connection begins with one CONNECT")
        try:
            if request.op is ControlOp.CONNECT:
                self._connect(request)
            else:
                self._write(ControlAnswer(request.op, digest=self._do(request)))
        except TanghuluError as error:
            self._listener.admission.num_refused += 1
            self._write(ControlAnswer(request.op, error))

    def _do(self, request: ControlRequest) -> int:
        """Perform the request of an admitted connection; return the checksum, if it asks for one."""
        connected = self._connected
        assert connected is not None, "it has a token"
        if request.op in _DIGEST_OPS:
            return self._listener.digest(connected, request)
        if request.op is ControlOp.FENCE:
            self._listener.fence(request.number)
        elif request.op is ControlOp.ADMIT:
            self._listener.admit_lease(connected.session_id, request.number)
        else:
            self._close_end()
        return 0

    def _turn_away(self, why: MalformedMessage) -> None:
        """Disconnect; first answer a peer of another version, and give it a stall's time to receive that."""
        if self._transport is None or self.token or not isinstance(why, OtherVersion):
            self.cut()
            return
        self._stranger = True
        self._data.clear()
        self._write(ControlAnswer(ControlOp.CONNECT, why.error))
        if self._transport.can_write_eof():
            self._transport.write_eof()

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _connect(self, request: ControlRequest) -> None:
        self._listener.admit(self, request)
        self._connected = request
        self._making = asyncio.get_running_loop().create_task(self._make(request))

    async def _make(self, request: ControlRequest) -> None:
        try:
            await self._listener.ends.make(request.number, request.payload, self._take)
        except TanghuluError as error:
            self._write(ControlAnswer(ControlOp.CONNECT, error))
        finally:
            self._making = None
        self._serve_whole()

    def _take(self, grant: Grant) -> None:
        """Serve through the end, unless the client is gone. Raises InvalidRequest if its session is."""
        if not self._open:
            grant.end.close()
            return
        try:
            self._listener.begun(self.session_id)
        except TanghuluError:
            grant.end.close()
            raise
        self._end = grant.end
        self._write(ControlAnswer(ControlOp.CONNECT, payload=grant.payload, leased=self._listener.leased))

    def _close_end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.close()
            self._listener.ended(self.session_id)

    def _write(self, answer: ControlAnswer) -> None:
        if self._transport is not None and self._open:
            self._transport.write(self._dialect.pack_answer(answer))
