"""The serving end of the rdma transport: the segment registered with every device, and a door that sets up queue pairs.

Owns the devices, the memory regions, the listener and the queue pairs. It takes no part in transfers. Who is admitted,
and which connections their clients have given up, is ``reception``'s decision, the same as for tcp; which sessions'
queue pairs must go because a lease has run out is ``access``'s. A queue pair is destroyed before anybody is told so:
before a FENCE or CLOSE is answered, and before ``end_direct`` frees a range.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from tanghulu.errors import LeaseExpired, NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.access import AccessTable
from tanghulu.transfer_engine.buffers import Buffer
from tanghulu.transfer_engine.leases import Freed
from tanghulu.transfer_engine.rdma_devices import LocalDevices
from tanghulu.transfer_engine.rdma_verbs import Device, MemoryRegion, QueuePair
from tanghulu.transfer_engine.rdma_wire import (
    REQUEST_BYTES,
    RdmaOp,
    RdmaRequest,
    check_request,
    pack_answer,
    pack_refusal,
    parse_request,
)
from tanghulu.transfer_engine.reception import Reception
from tanghulu.transfer_engine.segment import Endpoint, MemorySegment
from tanghulu.transfer_engine.wire import Head, MalformedMessage, Op, OtherVersion
from tanghulu.types import Address, LeaseId

_BACKLOG = 256
#: What a client may have sent before its queue pair stands: it has no more to ask than a few requests.
_MAX_UNSERVED_BYTES = 64 * REQUEST_BYTES


class RdmaDoor:
    """Serves ``segment`` on ``device_names`` (empty: every usable device); everything happens on one event loop."""

    def __init__(
        self,
        segment: MemorySegment,
        access: AccessTable | None,
        reception: Reception,
        on_freed: Callable[[Sequence[Freed]], None],
        *,
        host: str,
        advertised_host: str,
        device_names: Sequence[str],
    ) -> None:
        self.connections: set[RdmaServerConnection] = set()
        self.reception = reception
        self._segment = segment
        self._access = access
        self._on_freed = on_freed
        self._host, self._advertised_host = host, advertised_host
        self._device_names = device_names
        self._memory: Buffer | None = None
        self._regions: dict[str, tuple[Device, MemoryRegion]] = {}
        self._devices: LocalDevices | None = None
        self._listener: asyncio.Server | None = None
        self._port = 0

    # --- life

    async def start(self) -> None:
        """Register the segment and listen. Raises NodeUnavailable without a usable device, TransferFailed, OSError."""
        await asyncio.to_thread(self._register)
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: RdmaServerConnection(self), self._host, 0, backlog=_BACKLOG
            )
        except BaseException:
            self._unregister()
            raise
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._access is not None:
            self._access.on_revoke = self._revoke_soon

    def endpoints(self) -> list[Endpoint]:
        """One a device, in the order of preference."""
        address = str(Address(self._advertised_host, self._port))
        return [Endpoint("rdma", address, name) for name in self._regions]

    def close(self) -> None:
        """Destroy every queue pair, then let go of the memory and the devices."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for connection in list(self.connections):
            connection.cut()
        self._unregister()
        if self._access is not None:
            self._access.on_revoke = None

    def check(self) -> None:
        """Assert the invariants: a connection has a queue pair exactly while it is admitted."""
        for connection in self.connections:
            connection.check()

    # --- what a connection asks

    def admit(self, connection: RdmaServerConnection, request: RdmaRequest) -> None:
        """Let the connection in; raises the typed refusal."""
        self._region(request.device)
        head = Head(Op.HELLO, 0, request.session_id, request.name_hash, request.generation, request.token, 0)
        self.reception.hello(connection, head)

    async def make_pair(self, request: RdmaRequest, take: Callable[[QueuePair], None]) -> None:
        """Hand ``take`` a queue pair that is connected to the client's.

        It is made in a thread, because the kernel may look for the client's address for a second; the devices stay open
        until ``take`` has returned. Raises TransferFailed or NodeUnavailable.
        """
        devices, (device, _) = self._devices, self._region(request.device)
        assert devices is not None, "there are regions"
        devices.use()
        try:
            take(await asyncio.to_thread(_connected_pair, device, request))
        finally:
            devices.let_go()

    def begun(self, session_id: int) -> None:
        """A queue pair of the session begins to serve; ``ended`` follows. Raises InvalidRequest without the session."""
        if self._access is not None:
            self._access.begin_direct(session_id)

    def fence(self, token: int) -> None:
        """Cut the connection that its client gave up, also if it comes only later."""
        self.reception.fence(Head(Op.FENCE, 0, 0, 0, 0, token, 0))

    def key(self, device_name: str) -> tuple[int, int]:
        """(address, key) of the segment for one device."""
        assert self._memory is not None, "the segment is registered"
        return self._memory.address, self._region(device_name)[1].remote_key

    def ended(self, session_id: int) -> None:
        """A queue pair of the session is destroyed."""
        if self._access is not None:
            freed = self._access.end_direct(session_id)
            if freed:
                self._on_freed(freed)

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

    def _revoke(self, session_id: int) -> None:
        for connection in list(self.connections):
            if connection.session_id == session_id:
                connection.cut()

    def _region(self, name: str) -> tuple[Device, MemoryRegion]:
        found = self._regions.get(name)
        if found is None:
            raise NodeUnavailable(f"device {name!r} does not serve this segment; there are {list(self._regions)}")
        return found

    def _register(self) -> None:
        self._devices = LocalDevices.find(self._device_names)
        self._memory = Buffer(self._segment.view)
        try:
            for name in self._devices.names:
                device = self._devices.device(name)
                region = device.register(self._memory.address, self._memory.size_bytes, remote=True)
                self._regions[name] = (device, region)
        except TanghuluError:
            self._unregister()
            raise

    def _unregister(self) -> None:
        for _, region in self._regions.values():
            region.close()
        self._regions.clear()
        self._memory = None
        if self._devices is not None:
            self._devices.let_go()
            self._devices = None


class RdmaServerConnection(asyncio.Protocol):
    """One client's control connection and the queue pair that lives as long."""

    def __init__(self, door: RdmaDoor) -> None:
        self.token = 0
        self.session_id = 0
        self.sweep_mark: object = None
        self._door = door
        self._pair: QueuePair | None = None
        self._setting_up: asyncio.Task[None] | None = None
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
        """Serve whole requests, in order."""
        if self._stranger:
            return
        self._data += data
        self._serve_whole()
        if len(self._data) > _MAX_UNSERVED_BYTES:
            self.cut()

    def _serve_whole(self) -> None:
        try:
            while self._open and self._setting_up is None:
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
        """Destroy the queue pair, now, and hang up. One that is being made is destroyed unused."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """Assert the invariants."""
        assert self._pair is None or self.token
        assert self._admitted or self._pair is None

    # --- inside

    def _serve(self, request: RdmaRequest) -> None:
        if request.token == 0 and request.op is not RdmaOp.ADMIT:
            raise MalformedMessage("a token is not 0")
        if (request.op is RdmaOp.CONNECT) == (self.token != 0):
            raise MalformedMessage("a connection begins with one CONNECT")
        try:
            if request.op is RdmaOp.CONNECT:
                self._connect(request)
            elif request.op is RdmaOp.FENCE:
                self._door.fence(request.token)
                self._write(pack_answer(request.op))
            elif request.op is RdmaOp.ADMIT:
                self._door.admit_lease(self.session_id, request.token)
                self._write(pack_answer(request.op))
            else:
                self._end()
                self._write(pack_answer(request.op))
        except TanghuluError as error:
            self._write(pack_refusal(request.op, error))

    def _turn_away(self, why: MalformedMessage) -> None:
        """Hang up; tell one of another version first, and give it the time of a stall to hear it."""
        if self._transport is None or self.token or not isinstance(why, OtherVersion):
            self.cut()
            return
        self._stranger = True
        self._data.clear()
        self._write(pack_refusal(RdmaOp.CONNECT, why.error))
        self._transport.write_eof()

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _connect(self, request: RdmaRequest) -> None:
        self._door.admit(self, request)
        self.session_id = request.session_id
        self._setting_up = asyncio.get_running_loop().create_task(self._set_up(request))

    async def _set_up(self, request: RdmaRequest) -> None:
        try:
            await self._door.make_pair(request, lambda pair: self._take(pair, request))
        except TanghuluError as error:
            self._write(pack_refusal(RdmaOp.CONNECT, error))
        finally:
            self._setting_up = None
        self._serve_whole()

    def _take(self, pair: QueuePair, request: RdmaRequest) -> None:
        """Serve through the pair, unless the client is gone. Raises InvalidRequest if its session is."""
        if not self._open:
            pair.close()
            return
        try:
            self._door.begun(self.session_id)
        except TanghuluError:
            pair.close()
            raise
        self._pair = pair
        address, key = self._door.key(request.device)
        self._write(pack_answer(RdmaOp.CONNECT, pair.address, address, key, self._door.leased))

    def _end(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
            self._door.ended(self.session_id)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and self._open:
            self._transport.write(data)


def _connected_pair(device: Device, request: RdmaRequest) -> QueuePair:
    pair = device.queue_pair(1)
    try:
        pair.connect(request.address)
    except TanghuluError:
        pair.close()
        raise
    return pair
