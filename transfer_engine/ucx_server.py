"""The serving end of the ucx transport: a door that gives every connection an agent of its own to reach the segment.

Owns the listener and the agents. UCX moves the bytes in the agents' threads. Who is admitted, and which connections
their clients have given up, is ``reception``'s decision, the same as for tcp; which sessions' agents must go because a
lease has run out is ``access``'s. An agent is closed before anybody is told so: before a FENCE or CLOSE is answered,
and before ``end_direct`` frees a range. Closing one takes some milliseconds on the event loop; making one takes longer
and is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from tanghulu.errors import LeaseExpired, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.transfer_engine.access import AccessTable
from tanghulu.transfer_engine.buffers import Buffer
from tanghulu.transfer_engine.leases import Freed
from tanghulu.transfer_engine.reception import Reception
from tanghulu.transfer_engine.segment import Endpoint, MemorySegment
from tanghulu.transfer_engine.ucx_agent import Agent, probe
from tanghulu.transfer_engine.ucx_wire import REQUEST_BYTES, UcxAnswer, UcxOp, UcxRequest, check_request, parse_request
from tanghulu.transfer_engine.wire import Head, MalformedMessage, Op, OtherVersion
from tanghulu.types import Address, LeaseId

_BACKLOG = 256
#: Agents at once; each has a thread, some 15 descriptors and 5 MB.
MAX_AGENTS = 64


class UcxDoor:
    """Serves ``segment`` through UCX; everything but the making of agents happens on one event loop."""

    def __init__(
        self,
        segment: MemorySegment,
        access: AccessTable | None,
        reception: Reception,
        on_freed: Callable[[Sequence[Freed]], None],
        *,
        host: str,
        advertised_host: str,
    ) -> None:
        self.connections: set[UcxServerConnection] = set()
        self.reception = reception
        self._segment = segment
        self._access = access
        self._on_freed = on_freed
        self._host, self._advertised_host = host, advertised_host
        self._memory: Buffer | None = None
        self._listener: asyncio.Server | None = None
        self._also_revoke: Callable[[int], None] | None = None
        self._port = 0

    # --- life

    async def start(self) -> None:
        """Listen. Raises NodeUnavailable without NIXL, OSError."""
        reason = await asyncio.to_thread(probe)
        if reason:
            raise NodeUnavailable(reason)
        self._memory = Buffer(self._segment.view)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: UcxServerConnection(self), self._host, 0, backlog=_BACKLOG)
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._access is not None:
            self._also_revoke = self._access.on_revoke
            self._access.on_revoke = self._revoke_soon

    def endpoints(self) -> list[Endpoint]:
        """The door; UCX finds the devices by itself."""
        return [Endpoint("ucx", str(Address(self._advertised_host, self._port)))]

    def close(self) -> None:
        """Close every agent, then let go of the memory."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for connection in list(self.connections):
            connection.cut()
        self._memory = None
        if self._access is not None:
            self._access.on_revoke = self._also_revoke

    def check(self) -> None:
        """Assert the invariants: a connection has an agent exactly while it is admitted."""
        assert len(self.connections) <= MAX_AGENTS
        for connection in self.connections:
            connection.check()

    # --- what a connection asks

    def admit(self, connection: UcxServerConnection, request: UcxRequest) -> None:
        """Let the connection have an agent; raises the typed refusal."""
        if len(self.connections) > MAX_AGENTS:
            raise Overloaded(f"{MAX_AGENTS} ucx connections are open; use another transport")
        head = Head(Op.HELLO, 0, request.session_id, request.name_hash, request.generation, request.token, 0)
        self.reception.hello(connection, head)

    def make_agent(self, token: int) -> tuple[Agent, bytes, int]:
        """(a serving agent, its metadata, the segment's address). Runs in a thread; raises TanghuluError."""
        if self._memory is None:
            raise NodeUnavailable("the segment's server is closing")
        address, num_bytes = self._memory.address, self._memory.size_bytes
        agent = Agent(f"owner-{token:x}", serves=True)
        try:
            return agent, agent.offer(address, num_bytes), address
        except TanghuluError:
            agent.close()
            raise

    def began(self, session_id: int) -> None:
        """An agent of the session works from now on; raises InvalidRequest if the session is not open."""
        if self._access is not None:
            self._access.begin_direct(session_id)

    def ended(self, session_id: int) -> None:
        """An agent of the session is closed."""
        if self._access is not None:
            freed = self._access.end_direct(session_id)
            if freed:
                self._on_freed(freed)

    def fence(self, token: int) -> None:
        """Cut the connection that its client gave up, also if it comes only later."""
        self.reception.fence(Head(Op.FENCE, 0, 0, 0, 0, token, 0))

    def admit_lease(self, session_id: int, lease_id: int) -> None:
        """Raises LeaseExpired if the session may not use the lease now; when it is lost later, ``_revoke`` follows."""
        if self._access is None:
            return
        lease = self._access.lease(LeaseId(lease_id))
        if lease is None or lease.session_id != session_id or not self._access.is_active(lease.lease_id):
            raise LeaseExpired(f"session {session_id} has no lease {lease_id} (any more); reserve or pin again")

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


class UcxServerConnection(asyncio.Protocol):
    """One client's control connection and the agent that lives as long."""

    def __init__(self, door: UcxDoor) -> None:
        self.token = 0
        self.session_id = 0
        self.sweep_mark: object = None
        self._door = door
        self._agent: Agent | None = None
        self._making: asyncio.Task[None] | None = None
        self._stranger = False  # told that it speaks another version; it is not listened to any more
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._admitted = False

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Turn the peer away when the server is full."""
        self._transport = cast(asyncio.Transport, transport)
        self._admitted = self._door.reception.opened(self)
        if self._admitted:
            self._door.connections.add(self)
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or was cut."""
        self._transport = None
        self._end()
        if self._admitted:
            self._admitted = False
            self._door.connections.discard(self)
            self._door.reception.closed(self)

    def data_received(self, data: bytes) -> None:
        """Serve whole requests, in order; those behind a CONNECT wait for its agent."""
        if self._stranger:
            return
        self._data += data
        try:
            while self._transport is not None and self._making is None:
                check_request(self._data)
                if len(self._data) < REQUEST_BYTES:
                    return
                request = bytes(self._data[:REQUEST_BYTES])
                del self._data[:REQUEST_BYTES]
                self._serve(parse_request(request))
        except MalformedMessage as error:
            self._turn_away(error)

    # --- what the reception may do

    @property
    def progress(self) -> tuple[int, int] | None:
        """None: nothing is in work here that could stall, but one of another version that does not hang up."""
        return (-1, 0) if self._stranger else None

    def cut(self) -> None:
        """Close the agent, now, and hang up."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """Assert the invariants."""
        assert self._agent is None or self.token
        assert self._admitted or self._agent is None

    # --- inside

    def _serve(self, request: UcxRequest) -> None:
        if request.token == 0 and request.op is not UcxOp.ADMIT:
            raise MalformedMessage("a token is not 0")
        if (request.op is UcxOp.CONNECT) == (self.token != 0):
            raise MalformedMessage("a connection begins with one CONNECT")
        try:
            if request.op is UcxOp.CONNECT:
                self._door.admit(self, request)
                self.session_id = request.session_id
                self._making = asyncio.get_running_loop().create_task(self._make())
                return
            if request.op is UcxOp.FENCE:
                self._door.fence(request.token)
            elif request.op is UcxOp.ADMIT:
                self._door.admit_lease(self.session_id, request.token)
            else:
                self._end()
            self._write(UcxAnswer(request.op))
        except TanghuluError as error:
            self._write(UcxAnswer(request.op, error))

    def _turn_away(self, why: MalformedMessage) -> None:
        """Hang up; tell one of another version first, and give it the time of a stall to hear it."""
        if self._transport is None or self.token or not isinstance(why, OtherVersion):
            self.cut()
            return
        self._stranger = True
        self._data.clear()
        self._write(UcxAnswer(UcxOp.CONNECT, why.error))
        self._transport.write_eof()

    async def _make(self) -> None:
        """Give the client its agent, unless it hung up or was cut meanwhile."""
        answer = UcxAnswer(UcxOp.CONNECT)
        try:
            agent, metadata, address = await asyncio.to_thread(self._door.make_agent, self.token)
            answer = UcxAnswer(UcxOp.CONNECT, None, metadata, address, self._door.leased)
            if self._transport is None or self._transport.is_closing():
                agent.close()
                return
            try:
                self._door.began(self.session_id)
            except TanghuluError:
                agent.close()
                raise
            self._agent = agent
        except TanghuluError as error:
            answer = UcxAnswer(UcxOp.CONNECT, error)
        finally:
            self._making = None
        self._write(answer)
        self.data_received(b"")

    def _end(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
            self._door.ended(self.session_id)

    def _write(self, answer: UcxAnswer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(answer.pack())
