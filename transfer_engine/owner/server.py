"""SegmentServer: one process's segment, offered to peers over shm and tcp.

Owns the listeners, the sweep's timer and the watch over peers' processes. What peers are told is ``reception``'s
decision, what they may touch ``access``'s; how bytes move is ``tcp_server``'s and the peer's own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence

from tanghulu.runtime.busy_polling import SPIN_S, LoopPoller, PollBudget, paying_spin_s
from tanghulu.runtime.clock import SystemClock
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.admission import OnNotice, Reception
from tanghulu.transfer_engine.core.leases import Freed
from tanghulu.transfer_engine.core.segment import Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.transports.onesided.listener import FarEnds, OneSidedDoor
from tanghulu.transfer_engine.transports.rdma.listener import RdmaEnds
from tanghulu.transfer_engine.transports.shm.listener import ProcessWatch, ShmDoor
from tanghulu.transfer_engine.transports.tcp.listener import TcpConnection
from tanghulu.transfer_engine.transports.ucx.listener import UcxEnds
from tanghulu.types import Address

#: A slice without a byte of progress for this long has its connection closed, so that its range can be reused.
STALL_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 1024
_BACKLOG = 1024


def _soon(callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(callback)


class SegmentServer:
    """Serves ``segment`` until ``close()``; everything happens on the event loop that called ``start()``.

    ``access`` decides about every range; None opens the whole segment to everybody who can connect (tests, benches).
    ``on_freed`` is told, on the loop, which ranges became free because a transfer ended or a peer's process exited.
    ``on_notice`` is told, on the loop, what clients notify by ``TransferRequest.notify``; without it that is refused.
    ``unix_path=None`` offers no shm; ``rdma_devices`` are the verbs devices to offer, empty for every usable one, None
    for no rdma; ``ucx`` offers UCX, which needs NIXL. ``advertised_host`` (by default ``host``) is what the descriptor
    tells peers; with ``tcp_devices``, pairs of a device's name and its address, it tells one endpoint for each
    (``host`` must then let all of them in), and with ``tcp_distances`` which of these are not its preferred ones.
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
        rdma_devices: Sequence[str] | None = None,
        ucx: bool = False,
        generation: int,
        host_id: str,
        name: str | None = None,
        on_freed: Callable[[Sequence[Freed]], None] | None = None,
        on_notice: OnNotice | None = None,
        advertised_host: str | None = None,
        tcp_devices: Sequence[tuple[str, str]] = (),
        tcp_distances: Mapping[str, int] | None = None,
        tls: ssl.SSLContext | None = None,
        max_connections: int = MAX_CONNECTIONS,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        spin_s: float = SPIN_S,
    ) -> None:
        assert name is None or name == segment.name, "a segment is offered under its own name"
        self._segment = segment
        self._access = access
        self._host, self._port, self._unix_path = host, port, unix_path
        self._advertised_host = advertised_host or host
        self._tcp_devices = tuple(tcp_devices) or (("", self._advertised_host),)
        self._tcp_distances = tcp_distances or {}
        self._generation = generation
        self._host_id = host_id
        self._on_freed = on_freed
        self._tls = tls
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        spin_s = paying_spin_s(spin_s)
        self._rdma_devices = rdma_devices
        self._offers_ucx = ucx
        self._one_sided: dict[str, OneSidedDoor] = {}
        self._listener: asyncio.Server | None = None
        self._door: ShmDoor | None = None
        self._watch = ProcessWatch(self._process_exited)
        self._sweeping: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._reception = Reception(
            segment,
            access,
            generation=generation,
            max_connections=max_connections,
            soon=_soon,
            on_freed=self._tell,
            on_emptied=self._emptied.set,
            on_notice=on_notice,
            spinner=LoopPoller(PollBudget(spin_s), SystemClock(), _soon) if spin_s > 0 else None,
        )

    # --- life

    async def start(self) -> None:
        """Listen on every transport; raises OSError if an address or the socket path is taken.

        With ``rdma_devices``: NodeUnavailable if there is no such usable device, TransferFailed if the memory cannot be
        registered. With ``ucx``: NodeUnavailable if NIXL is not here.
        """
        assert self._listener is None, "a server starts once"
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: TcpConnection(self._reception, encrypted=self._tls is not None),
            self._host,
            self._port,
            backlog=_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._stall_timeout_s,
        )
        self._reception.open = True
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._unix_path is not None:
            self._door = ShmDoor(
                self._segment, self._access, self._unix_path, self._generation, self._watch, self._max_connections
            )
            try:
                await self._door.start()
            except BaseException:  # a cancel, too: what listens would serve nobody's segment; it is raised on
                self._listener.close()
                raise
        if self._rdma_devices is not None:
            await self._start_one_sided(RdmaEnds(self._segment, self._rdma_devices))
        if self._offers_ucx:
            await self._start_one_sided(UcxEnds(self._segment))
        self._sweeping = loop.call_later(self._stall_timeout_s, self._sweep)

    def descriptor(self) -> SegmentDescriptor:
        """What peers need in order to open this segment; valid after ``start()``."""
        assert self._listener is not None, "start the server first"
        endpoints = [each for door in self._one_sided.values() for each in door.endpoints()]
        endpoints += [
            Endpoint("tcp", str(Address(host, self._port)), device, self._tcp_distances.get(device, 0))
            for device, host in self._tcp_devices
        ]
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
        self._reception.open = False
        for one_sided in reversed(self._one_sided.values()):
            one_sided.close()
        for connection in list(self._reception.connections):
            connection.cut()
        if self._door is not None:
            await self._door.close()
        self._watch.close()
        if self._reception.connections:
            await self._emptied.wait()
        await asyncio.sleep(0)  # ends of READs run one turn behind their connection_lost

    @property
    def num_connections(self) -> dict[str, int]:
        """Open connections by transport."""
        return {"shm": 0 if self._door is None else self._door.num_connections, "tcp": len(self._reception.connections)}

    @property
    def bytes_read(self) -> dict[str, int]:
        """By transport, from the client's point of view."""
        return {"shm": 0, "tcp": self._reception.bytes_read}

    @property
    def bytes_written(self) -> dict[str, int]:
        """By transport, from the client's point of view."""
        return {"shm": 0, "tcp": self._reception.bytes_written}

    @property
    def num_refused(self) -> int:
        """tcp connections and slices that were refused."""
        return self._reception.num_refused

    @property
    def num_notices(self) -> int:
        """Notices that were handed to ``on_notice``."""
        return self._reception.num_notices

    @property
    def num_mismatches(self) -> int:
        """Verified WRITEs that landed with another checksum."""
        return self._reception.num_mismatches

    @property
    def num_fenced(self) -> int:
        """tcp connections that their clients gave up with a WRITE on them."""
        return self._reception.num_fenced

    def check(self) -> None:
        """Assert the invariants."""
        self._reception.check()
        for door in self._one_sided.values():
            door.check()

    def __repr__(self) -> str:
        return f"SegmentServer({self._segment!r}, generation={self._generation}, {self.num_connections})"

    # --- inside

    async def _start_one_sided(self, ends: FarEnds) -> None:
        door = OneSidedDoor(
            ends,
            self._access,
            self._reception,
            self._tell,
            host=self._host,
            advertised_host=self._advertised_host,
        )
        try:
            await door.start()
        except BaseException:  # a cancel, too: what listens would serve nobody's segment; it is raised on
            await self.close()
            raise
        self._one_sided[ends.dialect.protocol] = door

    def _tell(self, freed: Sequence[Freed]) -> None:
        if freed and self._on_freed is not None:
            self._on_freed(freed)

    def _process_exited(self, session_id: int) -> None:
        if self._access is not None:
            self._tell(self._access.session_exited(session_id))

    def _sweep(self) -> None:
        """Cut connections that stall inside a slice; forget ended sessions."""
        self._reception.cut_stalled()
        for session_id in self._watch.session_ids:
            if self._access is None or not self._access.has_session(session_id):
                self._watch.forget(session_id)
        self._sweeping = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._sweep)
