"""A network in virtual time, for simulations: packets are late, lost, doubled, overtaken, held back by partitions.

Owns simulated sockets and their packets; the classes of the tcp transport run on it as they stand (``TcpLink`` and
``TcpStream`` through ``Network``, ``TcpConnection`` through ``SimTransport``). As under TCP a connection hands its
bytes on in order and once; what the weather does to packets shows as delay, as bytes of one connection that arrive long
after those of a younger one, and as bytes that arrive after their sender has hung up. Seeded: the same chance and the
same calls give the same run.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import random
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.network import Poller, StreamSocket
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.transports.tcp.listener import TcpConnection
from tanghulu.types import Address
from tests.transfer_engine.sim.transport import Pipe, SimTransport
from tests.virtual.clock import ManualClock

_TICK_S = 1e-9  # the shortest wait: less than that is lost when it is added to the time
_FIRST_FD = 1 << 24  # no descriptor of the process is that high


@dataclass(slots=True)
class Weather:
    """What happens to packets: probabilities, seconds, bytes."""

    loss: float = 0.02
    duplicate: float = 0.02
    #: A packet's bytes arrive changed, where ``SimNetwork.may_taint`` allows it.
    taint: float = 0.0
    delay_min_s: float = 0.001
    delay_max_s: float = 0.02
    #: A lost packet is sent again after so long.
    resend_s: float = 0.2
    packet_bytes: int = 300
    #: Bytes that a connection holds under way in one direction.
    window_bytes: int = 700


class SimNetwork:
    """Hosts, links, and what is under way between them. ``after_event`` is called when something has happened."""

    def __init__(self, clock: ManualClock, chance: random.Random, weather: Weather) -> None:
        self.clock, self.chance, self.weather = clock, chance, weather
        self.after_event: Callable[[], None] = lambda: None
        #: (transport, the memory that the bytes go to, the bytes), told before they are put there.
        self.on_received: Callable[[SimTransport, memoryview, bytes], None] = lambda transport, into, data: None
        #: Whether bytes that go to this memory may be changed on their way; a connection's own words never are.
        self.may_taint: Callable[[memoryview], bool] = lambda into: False
        self.cut_links: set[tuple[str, str]] = set()  # (host, device) that are partitioned from everybody
        self.stalled: set[str] = set()  # addresses whose process does not run
        self.ports: dict[str, PeerAdmission] = {}
        self.transports: dict[str, list[SimTransport]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._fds = itertools.count(_FIRST_FD)

    # --- time

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` after ``delay_s`` of virtual time."""
        heapq.heappush(self._events, (self.clock.now_s() + delay_s, next(self._numbers), callback))

    def soon(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` as the next event of this moment."""
        self.later(0.0, callback)

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen up to ``until_s``, or until ``stop()``."""
        while not stop() and self._events and self._events[0][0] <= until_s:
            at_s, _, callback = heapq.heappop(self._events)
            self._move_to(at_s)
            callback()
            self.after_event()
        if not stop():
            self._move_to(until_s)

    def _move_to(self, at_s: float) -> None:
        self.clock.advance(max(0.0, at_s - self.clock.now_s()))

    # --- packets

    def delay_s(self) -> float:
        """How long a packet takes."""
        return self.chance.uniform(self.weather.delay_min_s, self.weather.delay_max_s)

    def drops(self, link: tuple[str, str]) -> bool:
        """Whether a packet on ``link`` is lost now."""
        return link in self.cut_links or self.chance.random() < self.weather.loss

    def tainted(self, into: memoryview, data: bytes) -> bytes:
        """``data`` as it arrives in ``into``."""
        if self.weather.taint and self.chance.random() < self.weather.taint and self.may_taint(into):
            at = self.chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self.chance.randrange(8)]) + data[at + 1 :]
        return data

    # --- hosts

    def listen(self, address: str, listener: PeerAdmission) -> None:
        """A process answers at ``address`` from now on."""
        self.ports[address] = listener
        self.transports[address] = []

    def crash(self, address: str, *, silently: bool) -> None:
        """The process at ``address`` is gone with its connections; ``silently``: its peers are not told."""
        del self.ports[address]
        for transport in self.transports.pop(address):
            transport.die(tell=not silently)

    def wake(self, address: str) -> None:
        """A stalled process runs on, and finds its connections in any order."""
        self.stalled.discard(address)
        for transport in self.transports.get(address, ()):
            self.later(self.delay_s(), transport.pump)

    def host(self, name: str) -> SimHost:
        """The Network that a client's transport uses."""
        return SimHost(self, name)

    def next_fd(self) -> int:
        """A number for a socket."""
        return next(self._fds)


class SimHost:
    """One client's machine: connects, and knows its sockets."""

    def __init__(self, network: SimNetwork, name: str) -> None:
        self.network, self.name = network, name
        self.sockets: dict[int, SimSocket] = {}

    def connect(self, path: Path, address: Address) -> StreamSocket:
        """Begin to connect over the path's device."""
        if (self.name, path.local_device) in self.network.cut_links and self.network.chance.random() < 0.5:
            raise NodeUnavailable(f"{path.label}: network is unreachable")
        sock = SimSocket(self, (self.name, path.local_device), str(address))
        self.sockets[sock.fileno()] = sock
        return sock

    def poller(self) -> Poller:
        """One that lets virtual time pass when it waits."""
        return SimPoller(self)


class SimSocket:
    """The client's end of a connection."""

    def __init__(self, host: SimHost, link: tuple[str, str], address: str) -> None:
        self._host, self._network = host, host.network
        self._fd = host.network.next_fd()
        self._inbox: deque[bytes] = deque()
        self._timeout_s = 0.0
        self._connected = self._reset = self._ended = self._closed = False
        self._transport: SimTransport | None = None
        self.out = Pipe(self._network, link)
        self.back = Pipe(self._network, link)
        self.back.deliver = self._deliver
        self.out.deliver = lambda data: self._arrived_first(address, data)
        self.out.send(b"")

    def fileno(self) -> int:
        """A number that is no descriptor; -1 when closed."""
        return -1 if self._closed else self._fd

    def setblocking(self, flag: bool, /) -> None:
        """Calls wait only without MSG_DONTWAIT."""
        assert flag

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """How long they wait."""
        assert option == socket.SO_RCVTIMEO
        seconds, microseconds = struct.unpack("ll", value)
        self._timeout_s = seconds + microseconds / 1e6

    def send(self, data: bytes, flags: int, /) -> int:
        """The same for one piece."""
        return self.sendmsg([data], (), flags)

    def sendmsg(self, buffers: Iterable[memoryview | bytes], ancillary: tuple[()], flags: int, /) -> int:
        """Put as much under way as the window takes."""
        assert flags == socket.MSG_DONTWAIT
        self._refuse_if_reset()
        if not self._connected:
            raise OSError(errno.ENOTCONN, "not connected")
        taken = self.out.take(buffers)
        if not taken:
            raise BlockingIOError
        return taken

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancillary_bytes: int, flags: int, /
    ) -> tuple[int, list[Any], int, Any]:
        """Wait, if the call may, and take what has arrived."""
        num_bytes = 0
        for number, buffer in enumerate(buffers):
            if number and not self._inbox:
                break
            taken = self.recv_into(buffer, 0, flags if number == 0 else socket.MSG_DONTWAIT)
            num_bytes += taken
            if taken < len(buffer):
                break
        return num_bytes, [], 0, None

    def recv_into(self, buffer: memoryview, num_bytes: int, flags: int, /) -> int:
        """Take what has arrived; virtual time passes until something has, if the call may wait."""
        assert num_bytes == 0
        if flags & socket.MSG_WAITALL:
            return self._receive_all(buffer)
        if not flags & socket.MSG_DONTWAIT and not self.ready(select.EPOLLIN):
            until_s = self._network.clock.now_s() + self._timeout_s
            self._network.run(until_s, lambda: bool(self.ready(select.EPOLLIN)))
        if not self._inbox:
            self._refuse_if_reset()
            if self._ended:
                return 0
            raise BlockingIOError
        first = self._inbox.popleft()
        num_bytes = min(len(first), len(buffer))
        buffer[:num_bytes] = self._network.tainted(buffer, first[:num_bytes])
        if num_bytes < len(first):
            self._inbox.appendleft(first[num_bytes:])
        self.back.consumed(num_bytes)
        return num_bytes

    def _receive_all(self, buffer: memoryview) -> int:
        """Take what arrives until the buffer is full, the time is over, or the connection ends."""
        until_s = self._network.clock.now_s() + self._timeout_s
        got = 0
        while got < len(buffer):
            if not self.ready(select.EPOLLIN):
                self._network.run(until_s, lambda: bool(self.ready(select.EPOLLIN)))
            if not self._inbox and got:
                break
            taken = self.recv_into(buffer[got:], 0, socket.MSG_DONTWAIT)
            got += taken
            if not taken:
                break
        return got

    def close(self) -> None:
        """Hang up; what was sent still travels, and its end behind it."""
        if not self._closed:
            del self._host.sockets[self._fd]
            self._closed = True
            self._inbox.clear()
            self.out.send(None)

    def reset(self) -> None:
        """The connection broke, and the peer's machine says so."""
        self._reset = True

    def ready(self, eventmask: int) -> int:
        """Which epoll events are due."""
        events = select.EPOLLIN if self._inbox or self._ended or self._reset else 0
        if self._connected and self.out.room > 0:
            events |= select.EPOLLOUT
        return (events & eventmask) | (select.EPOLLHUP if self._reset else 0)

    def _refuse_if_reset(self) -> None:
        if self._reset:
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")

    def _arrived_first(self, address: str, data: bytes | None) -> None:
        """The request to connect reached the peer's machine."""
        listener = self._network.ports.get(address)
        if listener is None:
            self._network.later(self._network.delay_s(), self.reset)
            return
        if data is None:
            return
        transport = self._transport = SimTransport(self._network, self, address)
        self._network.transports[address].append(transport)
        self._network.later(self._network.delay_s(), self._connect)
        transport.serve(TcpConnection(listener))

    def _connect(self) -> None:
        self._connected = True

    def _deliver(self, data: bytes | None) -> None:
        if self._closed:
            if data and self._transport is not None:  # as a kernel answers bytes for a socket that is gone
                self._network.later(self._network.delay_s(), self._transport.abort)
        elif data is None:
            self._ended = True
        else:
            self._inbox.append(data)


class SimPoller:
    """epoll over SimSockets; real descriptors that are registered too are never ready."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self._masks: dict[int, int] = {}

    def register(self, fd: int, eventmask: int, /) -> None:
        """Watch a socket."""
        self._masks[fd] = eventmask

    def modify(self, fd: int, eventmask: int, /) -> None:
        """Watch for something else."""
        assert fd in self._masks
        self._masks[fd] = eventmask

    def unregister(self, fd: int, /) -> None:
        """Watch it no more."""
        del self._masks[fd]

    def poll(self, timeout: float | None, /) -> list[tuple[int, int]]:
        """What is ready; virtual time passes, at most ``timeout`` of it, until something is."""
        network = self._host.network
        if timeout and not self._ready():
            network.run(network.clock.now_s() + max(timeout, _TICK_S), lambda: bool(self._ready()))
        return self._ready()

    def fileno(self) -> int:
        """None: only a link that is alone can be waited for."""
        return -1

    def close(self) -> None:
        """Nothing to let go of."""

    def _ready(self) -> list[tuple[int, int]]:
        socks = self._host.sockets
        found = [(fd, socks[fd].ready(mask)) for fd, mask in self._masks.items() if fd in socks]
        return [(fd, events) for fd, events in found if events]
