"""Serving side of the tcp transport: a port, and one protocol object per connection, straight into the segment.

Owns a connection's parsing and its flow control. Its ``PeerAdmission`` decides what is allowed. A connection works on
one slice at a time, in order; it stops reading while anything waits to be sent, so a peer can make us hold no more than
one head, one reply, one piece of payload and the kernel's buffers.

Data goes to the socket by a system call of this file while the transport holds nothing back, and through the transport
otherwise; for 64 KiB that is a third of the work of a slice.

Zero-copy: a WRITE's payload is received into the segment itself (``get_buffer`` hands out the range), a READ's is
written from it in pieces. A piece counts as sent when the transport's write buffer is empty (the high-water mark is 0),
and the lease's transfer ends only after the last one: so a range is not reused while uvloop still points into it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import cast

from tanghulu.auth.handshakes import Handshakes
from tanghulu.errors import TanghuluError
from tanghulu.rpc.sockets import unpace_within_machine
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.segment import Endpoint
from tanghulu.transfer_engine.core.transport import ServeContext
from tanghulu.transfer_engine.core.wire import (
    HEAD_BYTES,
    REPLY_BYTES,
    Head,
    MalformedMessage,
    Op,
    OtherVersion,
    check_head_version,
    pack_refusal,
    pack_reply,
    parse_head,
)
from tanghulu.types import Address

_BACKLOG = 1024
#: Size of the buffer through which a refused WRITE's payload is discarded.
_DISCARD_BYTES = 256 << 10


class _Phase(Enum):
    """State of a connection."""

    #: Receiving a head.
    HEAD = "head"
    #: Receiving a granted WRITE's payload into the segment.
    PAYLOAD = "payload"
    #: Discarding a refused WRITE's payload.
    DISCARD = "discard"
    #: Receiving a notice for the owner's program.
    NOTICE = "notice"
    #: Sending a READ's payload; nothing is received meanwhile.
    SEND = "send"
    #: Informed that it speaks another version; its input is discarded until it disconnects.
    STRANGER = "stranger"


# Members as module names: every slice reads them, and an Enum lookup takes ten times as long (Python 3.11).
_HEAD, _PAYLOAD, _DISCARD, _NOTICE, _SEND, _STRANGER = _Phase
_READ, _WRITE, _HELLO = Op.READ, Op.WRITE, Op.HELLO


class TcpListener:
    """Serves a segment at the host and port of its ``ListenOptions``."""

    def __init__(self, context: ServeContext) -> None:
        self._context = context
        self._port = context.listen.port
        self._handshakes: Handshakes | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the address is taken."""
        context = self._context
        tls = context.listen.tls
        make: Callable[[], asyncio.BaseProtocol]
        make = partial(TcpConnection, context.admission, encrypted=tls is not None)
        if tls is not None:
            make = self._handshakes = Handshakes(tls, make, context.limits.hello_s)
        self._server = await asyncio.get_running_loop().create_server(
            make, context.listen.host, self._port, backlog=_BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def endpoints(self) -> list[Endpoint]:
        """Return one per device, or one for all."""
        listen = self._context.listen
        devices = listen.tcp_devices or (("", listen.announced_host),)
        return [
            Endpoint("tcp", str(Address(host, self._port)), device, listen.tcp_distances.get(device, 0))
            for device, host in devices
        ]

    @property
    def num_connections(self) -> int:
        """Open connections of clients."""
        return len(self._connections())

    async def close(self) -> None:
        """Stop listening and cut every connection; all of it before anything else runs."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._handshakes is not None:
            self._handshakes.close()
        for connection in self._connections():
            connection.cut()

    def check(self) -> None:
        """Assert the invariants: there is a port while it listens."""
        assert self._server is None or self._port > 0

    def _connections(self) -> list[TcpConnection]:
        return [each for each in self._context.admission.connections if isinstance(each, TcpConnection)]


class TcpConnection(asyncio.BufferedProtocol):
    """One client's stream of slices."""

    def __init__(self, admission: PeerAdmission, *, encrypted: bool = False) -> None:
        self._encrypted = encrypted
        self.token = 0
        self._session_id = 0  # of its hello
        self.sweep_mark: tuple[int, int] | None = None  # what the server saw at its last sweep
        self._admission = admission
        self._phase = _HEAD
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._head_bytes = self._num_heads = 0
        self._work: Head | None = None  # the begun slice
        self._done_bytes = 0  # of it, or of the notice
        self._notice = self._discard = memoryview(b"")
        self._discard_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._fd = -1  # the transport's socket, if it has one, while it is open
        self._admitted = False
        self._writable = True

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set flow control, or refuse the peer when the server is full. (Both loops set TCP_NODELAY themselves.)"""
        stream = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        # With 0, TLS would pause before anything waits. With 1 it does here, for its own handshake, and resumes only
        # when it has read: ``pause_writing`` must not know the transport yet.
        stream.set_write_buffer_limits(high=1 if self._encrypted else 0)
        self._transport = stream
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._fd = -1 if self._encrypted else sock.fileno()  # direct writes are not encrypted
            unpace_within_machine(sock, transport.get_extra_info("peername") or ("",))
        self._admitted = self._admission.opened(self)
        if not self._admitted:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the open slice; for a READ only after this callback: uvloop closes the socket right after it."""
        self._fd = -1
        if self._phase is _SEND:
            self._admission.soon(self._finish)
        else:
            self._finish()
        if self._admitted:
            self._admitted = False
            self._admission.closed(self)
        self._transport = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the destination of the next bytes: the head, the segment itself, the notice, or the bin."""
        phase = self._phase
        if phase is _PAYLOAD:
            head = self._work
            assert head is not None
            return self._admission.view[head.offset + self._done_bytes : head.offset + head.length]
        if phase is _HEAD or phase is _SEND:
            return self._head[self._head_bytes :] if self._head_bytes else self._head
        if phase is _NOTICE:
            return self._notice[self._done_bytes :]
        return self._discard[: min(self._discard_bytes, _DISCARD_BYTES)]

    def buffer_updated(self, nbytes: int) -> None:
        """Process ``nbytes`` that arrived in ``get_buffer``'s memory."""
        phase = self._phase
        if phase is _PAYLOAD:
            self._received(nbytes)
        elif phase is _DISCARD:
            self._discarded(nbytes)
        elif phase is _NOTICE:
            self._noticed(nbytes)
        elif phase is not _STRANGER:
            self._head_bytes += nbytes
            if self._head_bytes == HEAD_BYTES:
                self._head_bytes = 0
                self._num_heads += 1
                self._on_head()
            elif self.token == 0:
                self._on_half_hello()

    def eof_received(self) -> bool:
        """Close: the peer has disconnected."""
        return False

    def pause_writing(self) -> None:
        """Receive nothing while something waits in the transport's buffer."""
        self._writable = False
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on: the transport's buffer is empty, everything written has left the segment."""
        self._writable = True
        if self._phase is _SEND:
            self._send_on()
        if self._writable and self._transport is not None:
            self._transport.resume_reading()

    # --- for the admission

    @property
    def progress(self) -> tuple[int, int] | None:
        """(slice id, bytes moved) of the slice in work, None if there is none; a stall shows the same twice.

        Anything else, such as an incomplete head or an unsent reply, has a negative number.
        """
        if self._phase is _DISCARD:
            return (-1, self._discard_bytes)
        if self._phase is _NOTICE:
            return (-2, self._done_bytes)
        if self._phase is _STRANGER:
            return (-3, 0)
        kept = 0 if self._writable or self._transport is None else self._transport.get_write_buffer_size()
        if self._work is None:
            return (-4 - self._num_heads, self._head_bytes - kept) if self._head_bytes or kept else None
        return (self._work.slice_id, self._done_bytes - kept)

    def cut(self) -> None:
        """Close at once: nothing is received into the segment after this call; a READ ends with its socket."""
        self._fd = -1
        if self._transport is not None:
            self._transport.abort()
        if self._phase is _PAYLOAD:
            self._finish()

    # --- inside

    def _on_head(self) -> None:
        try:
            head = parse_head(self._head)
        except MalformedMessage as error:
            self._turn_away(error)
            return
        if self.token and head.session_id != self._session_id:
            self.cut()
            return
        try:
            if head.op is _READ and self.token:
                self._admission.begin(head)
                self._start_sending(head)
            else:
                self._admit(head)
        except TanghuluError as error:
            self._refuse(head, error)

    def _on_half_hello(self) -> None:
        try:
            check_head_version(self._head[: self._head_bytes])
        except OtherVersion as other:
            self._turn_away(other)

    def _turn_away(self, why: MalformedMessage) -> None:
        """Disconnect; first answer a peer of another version, and give it a stall's time to receive that."""
        if self._transport is None or self.token or not isinstance(why, OtherVersion):
            self.cut()
            return
        self._phase = _STRANGER
        self._discard_bytes, self._discard = HEAD_BYTES, memoryview(bytearray(HEAD_BYTES))
        self._write(pack_refusal(0, why.error))
        if not self._encrypted:  # TLS cannot end one direction
            self._transport.write_eof()

    def _admit(self, head: Head) -> None:
        op, admission = head.op, self._admission
        if self.token == 0 and op is not _HELLO:
            self.cut()
        elif op is _WRITE:
            admission.begin(head)
            self._work, self._done_bytes = head, 0
            self._phase = _PAYLOAD
        elif op is _HELLO:
            admission.hello(self, head)
            self._session_id = head.session_id
            self._write(pack_reply(head.slice_id, 0))
        elif op is Op.NOTICE:
            self._notice = memoryview(bytearray(HEAD_BYTES + head.length))
            self._notice[:HEAD_BYTES], self._done_bytes = self._head, HEAD_BYTES
            self._phase = _NOTICE
        else:
            admission.fence(head)
            self._write(pack_reply(head.slice_id, 0))

    def _refuse(self, head: Head, error: TanghuluError) -> None:
        self._admission.num_refused += 1
        self._write(pack_refusal(head.slice_id, error))
        if head.op is _WRITE:
            self._discard_bytes = head.length
            self._discard = memoryview(bytearray(min(head.length, _DISCARD_BYTES)))
            self._phase = _DISCARD

    def _received(self, nbytes: int) -> None:
        head = self._work
        assert head is not None
        self._done_bytes += nbytes
        if self._done_bytes < head.length:
            return
        reply = pack_reply(head.slice_id, 0)
        if head.verified:
            try:
                self._admission.compare(head)
            except TanghuluError as error:
                reply = pack_refusal(head.slice_id, error)
        self._finish()
        self._write(reply)

    def _noticed(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._done_bytes < len(self._notice):
            return
        head = parse_head(self._notice)
        data, self._notice = bytes(self._notice[HEAD_BYTES:]), memoryview(b"")
        self._phase = _HEAD
        try:
            self._admission.notice(head, data)
            self._write(pack_reply(head.slice_id, 0))
        except TanghuluError as error:
            self._refuse(head, error)

    def _discarded(self, nbytes: int) -> None:
        self._discard_bytes -= nbytes
        if self._discard_bytes == 0:
            self._discard = memoryview(b"")
            self._phase = _HEAD

    def _start_sending(self, head: Head) -> None:
        """Send the reply and the first piece, mostly all of it, by one system call."""
        admission, length = self._admission, head.length
        end = min(length, admission.piece_bytes)
        reply = pack_reply(head.slice_id, length, admission.digest(head) if head.verified else 0)
        pieces = reply, admission.view[head.offset : head.offset + end]
        sent = self._send_now(pieces)
        if sent == REPLY_BYTES + length:
            admission.end(head, length)
            return
        self._phase, self._work, self._done_bytes = _SEND, head, end
        self._keep(sent, pieces)
        self._send_on()

    def _send_on(self) -> None:
        """Write pieces until the transport keeps one back; the slice ends when the last has left."""
        transport, admission = self._transport, self._admission
        while self._writable and (head := self._work) is not None and transport is not None:
            if transport.is_closing():
                return
            done = self._done_bytes
            if done == head.length:
                self._finish()
                return
            end = self._done_bytes = min(done + admission.piece_bytes, head.length)
            self._write(admission.view[head.offset + done : head.offset + end])

    def _finish(self) -> None:
        head, self._work = self._work, None
        self._phase = _HEAD
        if head is not None:
            self._admission.end(head, self._done_bytes)

    def _write(self, data: bytes | memoryview) -> None:
        """Send now what the socket takes, the rest when it takes more. Does nothing if the peer is gone."""
        self._keep(self._send_now((data,)), (data,))

    def _send_now(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Send now, and return the bytes that the socket took; 0 while the transport still holds earlier ones."""
        if not self._writable or self._fd < 0:
            return 0
        try:
            return os.writev(self._fd, pieces)
        except OSError:  # full, or broken, which the transport will notice
            return 0

    def _keep(self, num_sent: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Have the transport send what the socket did not take; it keeps views of it."""
        left: list[bytes | memoryview] = []
        for piece in pieces:
            if num_sent < len(piece):
                left.append(memoryview(piece)[num_sent:])
            num_sent = max(0, num_sent - len(piece))
        if left and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(left)
