"""The tcp transport: several non-blocking streams to one peer, received straight into the destination.

Owns sockets and their bytes, decides nothing. Heads of many slices go ahead on a stream, the peer answers them in
order.

No late duplicate of a failed WRITE: a stream that failed is closed and a retry goes over another connection. Its bytes
may still sit in the peer's socket, so every stream to that peer sends a FENCE with the closed connection's token before
its next slice (see ``fences``): the peer cuts that connection, or refuses it if it sees it only later, before it reads
what stands behind the fence. The same holds for what a batch that ended by deadline or cancel left behind, as far as
this process's later slices go; for everybody else its lease is the guard: the owner admits no slice after the lease's
end, and does not free the range while an admitted one is open.
A READ lands nothing after ``cut``: the socket is closed in this process.
"""

from __future__ import annotations

import os
import select

from tanghulu.clock import Clock
from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.fences import Fences
from tanghulu.transfer_engine.network import KernelNetwork, Network
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.segment import SegmentDescriptor
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.tcp_stream import StreamBroken, TcpStream
from tanghulu.transfer_engine.transport import Completion, Lost
from tanghulu.types import Address


class TcpPeer:
    """A remote segment behind one or more ``host:port``."""

    def __init__(self, descriptor: SegmentDescriptor, session_id: int, network: Network | None = None) -> None:
        self._descriptor = descriptor
        self._session_id = session_id
        self._network = network or KernelNetwork()
        self.fences = Fences()

    def connect(self) -> TcpLink:
        """A new link; its streams connect when the first slice is posted on them."""
        return TcpLink(self._descriptor, self._session_id, self.fences, self._network)

    def close(self) -> None:
        """Links share no connection."""


class TcpLink:
    """One batch's streams to one peer."""

    def __init__(self, descriptor: SegmentDescriptor, session_id: int, fences: Fences, network: Network) -> None:
        self._descriptor = descriptor
        self._session_id = session_id
        self._fences = fences
        self._network = network
        self._streams: dict[Path, TcpStream] = {}
        self._by_fd: dict[int, TcpStream] = {}
        self._ended: list[Completion] = []
        self._broken: set[Path] = set()  # paths whose loss the next poll tells
        self._epoll = network.poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._closed = False

    # --- Link

    def post(self, piece: Slice, path: Path) -> None:
        """Queue the slice on the path's stream; connects it if it is not.

        A path that broke since the last poll takes nothing: the slice is lost with the others on it.
        """
        if path in self._broken:
            return
        try:
            self._stream(path).queue_slice(piece)
        except StreamBroken as broken:
            self._break(path, broken)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Send and receive what the sockets take and give."""
        for stream in tuple(self._streams.values()):
            if stream.has_output and not stream.blocked:
                self._attempt(stream, send=True, receive=False)
        for fd, events in self._epoll.poll(0 if self._ended else timeout_s):
            ready = self._by_fd.get(fd)
            if ready is not None:
                self._attempt(ready, send=events != select.EPOLLIN, receive=True)
            elif fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
        if self._broken:
            self._broken.clear()
        ended, self._ended = self._ended, []
        return ended

    def exchange(
        self,
        path: Path,
        opcode: Opcode,
        memory: memoryview,
        lease_id: int,
        remote_offset: int,
        timeout_s: float,
    ) -> bool:
        """Move one plain slice, fast where the path's stream is idle; whether it has arrived. False: ``resume``."""
        stream = self._streams.get(path)
        if stream is None or stream.num_fences < self._fences.num_added:
            return False
        return stream.exchange(opcode, memory, lease_id, remote_offset, timeout_s)

    def resume(self, path: Path, piece: Slice) -> None:
        """Go on with the slice that ``exchange`` did not finish, or begin with it; ``poll`` tells what became of it."""
        stream = self._streams.get(path)
        if stream is None or not stream.interrupted:
            self.post(piece, path)
            return
        try:
            stream.resume(piece, self._ended)
            if stream.blocked:
                self._watch(stream)
        except StreamBroken as broken:
            self._break(path, broken)

    def cut(self, path: Path) -> None:
        """Close the path's stream."""
        stream = self._streams.pop(path, None)
        if stream is None:
            return
        del self._by_fd[stream.fileno()]
        self._epoll.unregister(stream.fileno())
        if stream.writes_unanswered:
            self._fences.add(stream.token)
        stream.close()

    @property
    def reusable(self) -> bool:
        """Whether another batch may use this link: nothing is under way on it."""
        if self._closed or self._ended:
            return False
        for stream in self._streams.values():  # noqa: SIM110 - asked after every transfer, and any() takes twice as long
            if stream.busy:
                return False
        return True

    def fileno(self) -> int:
        """The epoll descriptor: readable when a socket is ready."""
        return self._epoll.fileno()

    def wake(self) -> None:
        """End a ``poll`` in another thread."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close every stream."""
        if self._closed:
            return
        self._closed = True
        for path in list(self._streams):
            self.cut(path)
        self._epoll.close()
        os.close(self._wake_fd)

    # --- for the engine

    def greet(self, path: Path, timeout_s: float, clock: Clock) -> None:
        """Connect the path's stream and wait for the peer's answer to its hello.

        Raises NodeUnavailable if there is none within ``timeout_s``, or the peer's refusal.
        """
        until_s = clock.now_s() + timeout_s
        try:
            stream = self._stream(path)
            while not stream.greeted:
                left_s = until_s - clock.now_s()
                if left_s <= 0:
                    raise StreamBroken(NodeUnavailable(f"{path.label} did not answer within {timeout_s:g} s"))
                for fd, events in self._epoll.poll(left_s):
                    if fd == stream.fileno():
                        self._serve(stream, send=bool(events & ~select.EPOLLIN), receive=True)
        except StreamBroken as broken:
            self.cut(path)
            raise broken.error from None

    # --- inside

    def _stream(self, path: Path) -> TcpStream:
        stream = self._streams.get(path)
        if stream is None:
            address = Address.parse(path.endpoint.address)
            try:
                sock = self._network.connect(path, address)
            except NodeUnavailable as error:
                raise StreamBroken(error) from error
            stream = TcpStream(path, sock, self._descriptor, self._session_id)
            self._streams[path] = stream
            self._by_fd[stream.fileno()] = stream
            self._epoll.register(stream.fileno(), stream.interest)
        if stream.num_fences < self._fences.num_added:
            stream.queue_fences(*self._fences.since(stream.num_fences))
        return stream

    def _attempt(self, stream: TcpStream, *, send: bool, receive: bool) -> None:
        try:
            self._serve(stream, send=send, receive=receive)
        except StreamBroken as broken:
            self._break(stream.path, broken)

    def _serve(self, stream: TcpStream, *, send: bool, receive: bool) -> None:
        if send:
            stream.send()
        if receive:
            stream.receive(self._ended)
        if stream.blocked is not stream.watched_blocked:
            self._watch(stream)

    def _watch(self, stream: TcpStream) -> None:
        self._epoll.modify(stream.fileno(), stream.interest)
        stream.watched_blocked = stream.blocked

    def _break(self, path: Path, broken: StreamBroken) -> None:
        stream = self._streams.get(path)
        had_slices = stream is None or stream.has_slices
        self.cut(path)
        if had_slices:  # an idle stream that its peer closed is no event for anybody
            self._broken.add(path)
            self._ended.append(Lost(path, broken.error))
