"""One non-blocking TCP connection of the client: heads and payloads out, replies and payloads in, in order.

Owns the socket and the order of what is expected on it. Raises StreamBroken when the connection cannot be used any
more; who uses it then and what is tried instead is decided elsewhere.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import select
from collections import deque
from collections.abc import Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.network import StreamSocket
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.segment import SegmentDescriptor
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.transport import Arrived, Completion, Refused
from tanghulu.transfer_engine.wire import (
    REPLY_BYTES,
    Head,
    MalformedMessage,
    Op,
    name_hash,
    parse_error,
    parse_reply,
)

_MAX_IOVECS = 64
_HELLO_ID = 0


class StreamBroken(Exception):
    """The connection is of no use any more; ``error`` says why, in the caller's terms."""

    def __init__(self, error: TanghuluError) -> None:
        super().__init__(error.message)
        self.error = error


class TcpStream:
    """A connection on ``path``; says hello first. ``sock`` has begun to connect, and is closed by ``close``."""

    def __init__(self, path: Path, sock: StreamSocket, descriptor: SegmentDescriptor, session_id: int) -> None:
        self.path = path
        self.token = secrets.randbits(63) | 1
        self.greeted = False
        self.blocked = True  # until the connection stands, and whenever the socket takes no more
        self.num_fences = 0
        self._generation = descriptor.generation
        self._session_id = session_id
        self._out: deque[memoryview] = deque()
        self._expected: deque[Slice | Op] = deque()
        self._num_writes = 0
        self._num_slices = 0
        self._head = memoryview(bytearray(REPLY_BYTES))
        self._into = self._head  # where the next bytes belong
        self._got = 0
        self._text: bytearray | None = None  # a refusal's text, while it is received
        self._sock = sock
        self.watched = self.interest
        self._queue_control(Op.HELLO, self.token, name_hash(descriptor.name))

    # --- what the link asks

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    @property
    def interest(self) -> int:
        """The epoll events that matter now."""
        return select.EPOLLIN | (select.EPOLLOUT if self.blocked else 0)

    @property
    def has_output(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    @property
    def has_slices(self) -> bool:
        """Whether a slice is under way."""
        return self._num_slices > 0

    @property
    def busy(self) -> bool:
        """Whether anything is under way, control messages included."""
        return bool(self._expected or self._out)

    @property
    def writes_unanswered(self) -> bool:
        """Whether the peer may still be writing what came over this connection."""
        return self._num_writes > 0

    def queue_slice(self, piece: Slice) -> None:
        """Put the slice's head, and a WRITE's payload, behind what is queued."""
        op = Op.READ if piece.opcode is Opcode.READ else Op.WRITE
        self._queue_head(op, piece.slice_id, piece.lease_id, piece.remote_offset, piece.length)
        if op is Op.WRITE:
            self._out.append(piece.memory())
            self._num_writes += 1
        self._num_slices += 1
        self._expected.append(piece)

    def queue_fences(self, num_told: int, tokens: Sequence[int]) -> None:
        """Have the connections of ``tokens`` cut before anything queued later is served; then ``num_told`` are told."""
        for token in tokens:
            self._queue_control(Op.FENCE, token, 0)
        self.num_fences = num_told

    def send(self) -> None:
        """Give the socket what it takes."""
        try:
            self.blocked = False
            while self._out:
                self._sent(self._sock.sendmsg(list(itertools.islice(self._out, _MAX_IOVECS))))
        except BlockingIOError:
            self.blocked = True
        except OSError as error:
            if error.errno == errno.ENOTCONN:  # still connecting
                self.blocked = True
                return
            raise self._broken(error) from error

    def receive(self, ended: list[Completion]) -> None:
        """Take what the socket has; append what ended by it."""
        try:
            while True:
                wanted = len(self._into) - self._got
                num_bytes = self._sock.recv_into(self._into[self._got :])
                if num_bytes == 0:
                    raise StreamBroken(NodeUnavailable(f"{self.path.label}: the peer closed the connection"))
                self._got += num_bytes
                if num_bytes == wanted:
                    self._filled(ended)
                    if not self._expected:
                        return
                elif wanted > num_bytes:
                    return  # the socket is empty, or will be asked again
        except BlockingIOError:
            return
        except MalformedMessage as error:
            raise StreamBroken(TransferFailed(f"{self.path.label}: {error}")) from error
        except OSError as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """Close the socket; nothing is received into anybody's memory afterwards."""
        self._sock.close()
        self._into = self._head
        self._out.clear()
        self._expected.clear()

    # --- inside

    def _broken(self, error: OSError) -> StreamBroken:
        return StreamBroken(NodeUnavailable(f"{self.path.label}: {error.strerror or error}"))

    def _queue_head(self, op: Op, slice_id: int, lease_id: int, offset: int, length: int) -> None:
        head = Head(op, slice_id, self._session_id, lease_id, self._generation, offset, length)
        self._out.append(memoryview(head.pack()))

    def _queue_control(self, op: Op, token: int, lease_id: int) -> None:
        self._queue_head(op, _HELLO_ID, lease_id, token, 0)
        self._expected.append(op)

    def _sent(self, num_bytes: int) -> None:
        while num_bytes:
            first = self._out[0]
            if num_bytes < len(first):
                self._out[0] = first[num_bytes:]
                return
            num_bytes -= len(first)
            self._out.popleft()

    def _filled(self, ended: list[Completion]) -> None:
        """The memory that was being received into is full: a reply, a payload or a refusal's text."""
        self._got = 0
        if self._text is not None:
            text, self._text = self._text, None
            self._refused(parse_error(bytes(text)), ended)
        elif self._into is not self._head:
            self._arrived(ended)
        else:
            self._on_reply(ended)

    def _on_reply(self, ended: list[Completion]) -> None:
        refused, slice_id, num_bytes = parse_reply(self._head)
        if not self._expected:
            raise MalformedMessage(f"a reply to slice {slice_id} that nobody asked for")
        first = self._expected[0]
        if slice_id != (first.slice_id if isinstance(first, Slice) else _HELLO_ID):
            raise MalformedMessage(f"a reply to slice {slice_id} out of order")
        if refused:
            self._text = bytearray(num_bytes)
            self._into = memoryview(self._text)
        elif isinstance(first, Slice) and first.opcode is Opcode.READ:
            if num_bytes != first.length:
                raise MalformedMessage(f"{num_bytes} bytes for a slice of {first.length}")
            self._into = first.memory()
        elif num_bytes:
            raise MalformedMessage(f"{num_bytes} bytes behind a reply that has none")
        else:
            self._arrived(ended)

    def _arrived(self, ended: list[Completion]) -> None:
        first = self._next()
        if isinstance(first, Slice):
            ended.append(Arrived(first.slice_id))
        elif first is Op.HELLO:
            self.greeted = True

    def _refused(self, error: TanghuluError, ended: list[Completion]) -> None:
        first = self._next()
        if not isinstance(first, Slice):
            raise StreamBroken(error)
        ended.append(Refused(first.slice_id, error))

    def _next(self) -> Slice | Op:
        self._into = self._head
        first = self._expected.popleft()
        if isinstance(first, Slice):
            self._num_slices -= 1
            self._num_writes -= first.opcode is Opcode.WRITE
        return first
