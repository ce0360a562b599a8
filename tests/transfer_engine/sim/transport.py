"""The packets of one direction of a simulated connection, and the serving end as asyncio shows it to a protocol.

Owned by ``network``, which has the weather and the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import asyncio

    from tanghulu.transfer_engine.transports.tcp.listener import TcpConnection
    from tests.transfer_engine.sim.network import SimNetwork, SimSocket


class Pipe:
    """Bytes one way: cut into numbered packets, each delayed, lost and doubled by itself, handed on in order once."""

    def __init__(self, network: SimNetwork, link: tuple[str, str]) -> None:
        self.deliver: Callable[[bytes | None], None] = lambda data: None
        self.on_room: Callable[[], None] = lambda: None
        self.room = network.weather.window_bytes
        self._network, self._link = network, link
        self._num_sent = self._num_delivered = 0
        self._held: dict[int, bytes | None] = {}

    def take(self, buffers: Iterable[memoryview | bytes]) -> int:
        """Put under way as much as the window takes; returns how many bytes."""
        taken = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer) and self.room > 0:
                size = self._network.chance.randint(1, self._network.weather.packet_bytes)
                piece = bytes(buffer[at : at + min(size, self.room)])
                self.send(piece)
                at += len(piece)
            taken += at
            if at < len(buffer):
                break
        return taken

    def send(self, data: bytes | None) -> None:
        """One packet; None is the end of the stream, empty bytes its begin."""
        number = self._num_sent
        self._num_sent += 1
        self.room -= len(data or b"")
        network = self._network
        for _ in range(1 + (network.chance.random() < network.weather.duplicate)):
            network.later(network.delay_s(), lambda: self._arrive(number, data))

    def consumed(self, num_bytes: int) -> None:
        """The receiver took bytes: there is room for others."""
        self.room += num_bytes
        self.on_room()

    def _arrive(self, number: int, data: bytes | None) -> None:
        network = self._network
        if network.drops(self._link):
            network.later(network.weather.resend_s, lambda: self._arrive(number, data))
        elif number >= self._num_delivered and number not in self._held:
            self._held[number] = data
            while self._num_delivered in self._held:
                following = self._held.pop(self._num_delivered)
                self._num_delivered += 1
                self.deliver(following)


class SimTransport:
    """An asyncio.Transport of the serving process. Keeps views of what is written until the network takes it."""

    def __init__(self, network: SimNetwork, sock: SimSocket, address: str) -> None:
        self.address = address
        self._network, self._sock = network, sock
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[memoryview] = deque()
        self._paused = self._ended = self._closing = self._dead = self._full = self._silent = False
        self._protocol: TcpConnection | None = None

    def serve(self, protocol: TcpConnection) -> None:
        """The connection stands."""
        self._protocol = protocol
        self._sock.out.deliver = self._deliver
        self._sock.back.on_room = self._flush
        protocol.connection_made(cast("asyncio.BaseTransport", self))

    # --- the protocol's calls

    def get_extra_info(self, name: str) -> None:
        """There is no socket."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The high-water mark is 0 here."""
        assert high == 0

    def get_write_buffer_size(self) -> int:
        """What is kept."""
        return sum(map(len, self._outbox))

    def is_closing(self) -> bool:
        """Whether it was aborted."""
        return self._closing

    def pause_reading(self) -> None:
        """Take nothing more."""
        self._paused = True

    def resume_reading(self) -> None:
        """Take again."""
        self._paused = False
        self._network.soon(self.pump)

    def write(self, data: bytes | memoryview) -> None:
        """Send now what goes, keep views of the rest."""
        self.writelines([data])

    def writelines(self, pieces: Iterable[bytes | memoryview]) -> None:
        """The same for several."""
        self._outbox.extend(memoryview(piece) for piece in pieces)
        if self._network.chance.random() < 0.5:  # some loops send at once, some behind the current event
            self._send()
        else:
            self._network.soon(self._flush)
        if self._outbox and not self._full and self._protocol is not None:
            self._full = True
            self._protocol.pause_writing()

    def abort(self) -> None:
        """Hang up at once."""
        if not self._closing and not self._dead:
            self._closing = True
            self._network.soon(self._lose)

    # --- the network's

    def pump(self) -> None:
        """The process runs: take what has arrived, in the pieces that the protocol asks for."""
        while self._inbox and not (self._paused or self._closing or self._dead or self._stalled):
            assert self._protocol is not None
            into = self._protocol.get_buffer(-1)
            first = self._inbox.popleft()
            num_bytes = min(len(into), len(first))
            if num_bytes < len(first):
                self._inbox.appendleft(first[num_bytes:])
            self._network.on_received(self, into, first[:num_bytes])
            into[:num_bytes] = self._network.tainted(into, first[:num_bytes])
            self._sock.out.consumed(num_bytes)
            self._protocol.buffer_updated(num_bytes)
        if self._ended and not self._inbox and not self._stalled and not self._dead:
            self.abort()

    def die(self, *, tell: bool) -> None:
        """The process is gone."""
        self._dead = True
        self._silent = not tell
        self._outbox.clear()
        if tell:
            self._network.later(self._network.delay_s(), self._sock.reset)

    @property
    def _stalled(self) -> bool:
        return self.address in self._network.stalled

    def _deliver(self, data: bytes | None) -> None:
        if self._dead:
            if not self._silent:
                self._network.later(self._network.delay_s(), self._sock.reset)
            return
        if data is None:
            self._ended = True
        else:
            self._inbox.append(data)
        self._network.later(self._network.delay_s(), self.pump)

    def _send(self) -> None:
        while self._outbox and self._sock.back.room > 0 and not self._dead:
            first = self._outbox.popleft()
            taken = self._sock.back.take([first])
            if taken < len(first):
                self._outbox.appendleft(first[taken:])

    def _flush(self) -> None:
        if self._closing or self._dead:
            return
        if self._stalled:  # the kernel sends nothing by itself here: the process must run
            self._network.later(self._network.weather.resend_s, self._flush)
            return
        self._send()
        if self._full and not self._outbox and self._protocol is not None:
            self._full = False
            self._protocol.resume_writing()

    def _lose(self) -> None:
        if self._dead:
            return
        assert self._protocol is not None
        self._dead = True
        self._protocol.connection_lost(None)
        self._outbox.clear()
        self._sock.back.send(None)
        transports = self._network.transports.get(self.address, [])
        if self in transports:
            transports.remove(self)
