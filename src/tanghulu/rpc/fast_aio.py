"""The fast lane's asyncio client: one connection, any number of calls in flight."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerSilent,
    TanghuluError,
    Unauthorized,
)
from tanghulu.rpc.dialling import is_silence
from tanghulu.rpc.fast_client import LateReplies, Reply, deliver_late, error_in, outcome_of
from tanghulu.rpc.frames import PREAMBLE, Frame, FrameReader, call_id_of, encode_head
from tanghulu.rpc.sockets import SILENT_HOST_S, dial_nearby, notice_dead_peer, unpace_within_machine
from tanghulu.rpc.wire import Body, encode
from tanghulu.runtime.fork import lose_in_children
from tanghulu.types import Address

R = TypeVar("R", bound=Body)
#: Receives the reply, or the reason for its absence, in the same loop step.
OnReply: TypeAlias = Callable[[Reply[Any] | TanghuluError], None]

_CONNECT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0
#: Maximum wanted late replies of one connection; a peer that owes more is disconnected.
_MAX_LATE = 1024


class AsyncFastConnection(asyncio.Protocol):
    """One open connection; made by ``await AsyncFastConnection.connect(...)``.

    A reply of a type in ``on_late`` is delivered even after its caller timed out or was cancelled: it may carry a
    resource to be returned.
    """

    def __init__(self, peer: str, on_late: LateReplies | None = None) -> None:
        self.peer = peer
        self._on_late = on_late or {}
        self._num_late = 0
        self._reader = FrameReader()
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[type[Any], OnReply]] = {}
        self._streams: dict[int, tuple[type[Any], OnReply]] = {}
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.get_running_loop().create_future()
        self._reason = ""  # of the peer, or our own
        self._writable = asyncio.Event()
        self._writable.set()

    @classmethod
    async def connect(
        cls,
        address: Address | None,
        unix_path: str | None = None,
        *,
        shortcut: bool = False,
        tls: TlsFiles = NO_TLS,
        on_late: LateReplies | None = None,
    ) -> AsyncFastConnection:
        """Open a connection, over the Unix socket if its path exists here; raises NodeUnavailable.

        ``shortcut``: reach an address of this host by the Unix socket of that name, if there is one. ``tls`` with files
        encrypts TCP; raises Unauthorized for an invalid certificate.
        """
        loop = asyncio.get_running_loop()
        connection = cls(unix_path or str(address), on_late)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                if unix_path and os.path.exists(unix_path):  # noqa: ASYNC240 - one stat of a local path
                    await loop.create_unix_connection(lambda: connection, unix_path)
                elif address is not None and shortcut and (sock := dial_nearby(address)) is not None:
                    await loop.create_unix_connection(lambda: connection, sock=sock)
                elif address is not None:
                    context = client_context(tls) if tls else None
                    await loop.create_connection(lambda: connection, address.host, address.port, ssl=context)
                else:
                    raise NodeUnavailable(f"no Unix socket at {unix_path!r} and no TCP address to connect to")
        except ssl.SSLCertVerificationError as error:
            raise Unauthorized(f"the certificate of {address} was refused: {error.verify_message}") from error
        except OSError as error:  # includes TimeoutError
            kind = PeerSilent if is_silence(error) else NodeUnavailable
            raise kind(f"cannot connect to {connection.peer}: {_why(error)}") from error
        return connection

    @property
    def closed(self) -> bool:
        """Whether the connection is unusable."""
        return self._lost.done()

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 if closed."""
        sock = None if self._transport is None or self.closed else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preamble."""
        lose_in_children(self)
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own, which is not a subclass
        sock, peer = transport.get_extra_info("socket"), transport.get_extra_info("peername")
        if sock is not None and sock.family != socket.AF_UNIX and peer:
            unpace_within_machine(sock, peer)
        self._transport.write(PREAMBLE)

    def data_received(self, data: bytes) -> None:
        """Pass each frame to the call waiting for it."""
        try:
            only = self._reader.whole(data)
            for frame in self._reader.feed(data) if only is None else (only,):
                if frame.call_id == 0:
                    self._reason = error_in(frame).message
                waiting = self._pending.pop(frame.call_id, None) or self._streams.get(frame.call_id)
                if waiting is not None:
                    waiting[1](_outcome(waiting[0], frame))
        except InvalidRequest as error:
            assert self._transport is not None
            self._reason = error.message
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every call in flight with NodeUnavailable."""
        if not self._lost.done():
            self._lost.set_result(None)
        self._writable.set()
        reason = self._reason or exc or "closed"
        waiting = [*self._pending.values(), *self._streams.values()]
        self._pending, self._streams = {}, {}
        for _, on_reply in waiting:
            on_reply(NodeUnavailable(f"connection to {self.peer} was lost: {reason}"))

    def pause_writing(self) -> None:
        """Make calls wait before sending: the peer reads slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let calls send again."""
        self._writable.set()

    async def call(
        self,
        method: int,
        request: Body,
        reply_type: type[R],
        attachment: Sequence[bytes | bytearray | memoryview] = (),
        *,
        deadline_s: float = 5.0,
    ) -> Reply[R]:
        """Send one request and wait for its reply, at most ``deadline_s``.

        Raises the peer's typed error, DeadlineExceeded, or NodeUnavailable if the connection is lost.
        """
        try:
            async with asyncio.timeout(deadline_s):
                if not self._writable.is_set():
                    await self._writable.wait()
                return await self._exchange(method, request, reply_type, attachment)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.peer} did not answer within {deadline_s:g} s") from None

    async def _exchange(
        self,
        method: int,
        request: Body,
        reply_type: type[R],
        attachment: Sequence[bytes | bytearray | memoryview],
    ) -> Reply[R]:
        future: asyncio.Future[Reply[R]] = asyncio.get_running_loop().create_future()

        def on_reply(outcome: Reply[R] | TanghuluError) -> None:
            if future.done():
                deliver_late(self._on_late, reply_type, outcome)
                return
            if isinstance(outcome, TanghuluError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        call_id = self.send(method, request, reply_type, on_reply, attachment)
        try:
            return await future
        except BaseException:  # timed out or cancelled; everything is re-raised
            self._abandon(call_id, reply_type, future)
            raise

    def _abandon(self, call_id: int, reply_type: type[R], future: asyncio.Future[Reply[R]]) -> None:
        """Abandon a reply that is still to come, or came in the very step that ended the wait."""
        if self._pending.pop(call_id, None) is None:
            if future.done() and not future.cancelled() and future.exception() is None:
                deliver_late(self._on_late, reply_type, future.result())
        elif reply_type in self._on_late:
            self._num_late += 1
            self._pending[call_id] = reply_type, partial(self._came_late, reply_type)
            if self._num_late > _MAX_LATE:
                self.abort()

    def _came_late(self, reply_type: type[Any], outcome: Reply[Any] | TanghuluError) -> None:
        self._num_late -= 1
        deliver_late(self._on_late, reply_type, outcome)

    def send(
        self,
        method: int,
        request: Body,
        reply_type: type[Any],
        on_reply: OnReply,
        attachment: Sequence[bytes | bytearray | memoryview] = (),
    ) -> int:
        """Send one request without waiting; ``on_reply`` is called once, or never if this raises NodeUnavailable.

        The caller bounds the number in flight. Returns the call's number on this connection.
        """
        transport = self._open_transport()
        call_id, head = self._encode(method, request, attachment)
        self._pending[call_id] = (reply_type, on_reply)
        if attachment:
            transport.writelines([head, *attachment])
        else:
            transport.write(head)
        return call_id

    def stream(self, method: int, request: Body, reply_type: type[Any], on_reply: OnReply) -> int:
        """Begin a call answered by many messages; ``on_reply`` receives each, and last the reason for the end.

        Returns the call's number, for ``send_on``. Raises NodeUnavailable, and then reports nothing.
        """
        transport = self._open_transport()
        call_id, head = self._encode(method, request)
        self._streams[call_id] = reply_type, on_reply
        notice_dead_peer(transport.get_extra_info("socket"), SILENT_HOST_S)
        transport.write(head)
        return call_id

    def send_on(self, call_id: int, method: int, request: Body, most_unsent_bytes: int) -> None:
        """Send one more message of a stream, which has no answer of its own.

        Raises Overloaded if more than ``most_unsent_bytes`` would wait for the peer, and InvalidRequest for a message
        that is too large. On a lost connection it is dropped: ``on_reply`` receives the loss.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body = encode(request)
        head = encode_head(method, call_id, len(body), 0)
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes + len(body) > most_unsent_bytes:
            raise Overloaded(f"{self.peer} reads too slowly: {unsent_bytes} bytes are unsent; try again later")
        transport.write(head + body)

    def pause_reading(self) -> None:
        """Stop reading from the peer, which then keeps its messages, until ``resume_reading``."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _open_transport(self) -> asyncio.Transport:
        if self._transport is None or self._transport.is_closing():
            raise NodeUnavailable(f"connection to {self.peer} is closed")
        return self._transport

    def _encode(
        self, method: int, request: Body, attachment: Sequence[bytes | bytearray | memoryview] = ()
    ) -> tuple[int, bytes]:
        """Return the number of a call, and its bytes without the attachment."""
        call_id = call_id_of(next(self._numbers))
        body = encode(request)
        size = sum([memoryview(part).nbytes for part in attachment])
        return call_id, encode_head(method, call_id, len(body), size) + body

    def abort(self) -> None:
        """Cut the connection: every call in flight ends with NodeUnavailable, soon."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close the connection and wait until it is closed."""
        if self._transport is not None and not self.closed:
            self._transport.close()
            await asyncio.wait({self._lost}, timeout=_CLOSE_TIMEOUT_S)
            self._transport.abort()  # a peer that does not read would delay this for ever


def _why(error: OSError) -> str:
    """Return the system's text for ``error``; asyncio has its own for a refused connection."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or "no answer"


def _outcome(reply_type: type[R], frame: Frame) -> Reply[R] | TanghuluError:
    try:
        return outcome_of(reply_type, frame)
    except InvalidRequest as error:  # reported to this call's waiter
        return error
