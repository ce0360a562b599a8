"""The fast lane's blocking client: one connection, many threads, calls that may be pipelined.

No event loop: a blocking socket answers a small call in 12-20 us, an asyncio one in several times that.
A calling thread holds the connection until its replies are in; deadlines are kept by the kernel's
receive time-out, so that no call costs an extra poll.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, PeerSilent, TanghuluError
from tanghulu.rpc.dialling import CONNECT_TIMEOUT_S, dial, is_silence
from tanghulu.rpc.frames import ERROR, PREAMBLE, Frame, FrameReader, call_id_of, encode_head
from tanghulu.rpc.wire import Body, Failure, encode, parser_of
from tanghulu.types import Address

R = TypeVar("R", bound=Body)
Q = TypeVar("Q")
A = TypeVar("A")
#: Handler of late replies that nobody waits for, by type.
LateReplies: TypeAlias = Mapping[type[Any], Callable[[Any], None]]

#: Bytes of requests sent ahead of their replies. Less than a socket holds, so that the two sides cannot both block
#: writing to each other.
_WINDOW_BYTES = 64 << 10
#: Maximum posted requests without a reply; beyond it the next one waits for a reply.
_MAX_ABANDONED = 64
#: Buffers in one send: the kernel takes at most 1024 (IOV_MAX).
_MAX_PARTS = 1000
#: Maximum size of one receive: an answer with the largest inline value.
_RECEIVE_BYTES = 66 << 10
#: A deadline that has passed.
_AT_ONCE = float("-inf")


@dataclass(slots=True)  # not frozen, here and below: freezing costs a microsecond for each
class Call(Generic[R]):
    """A request to send: ``attachment`` is raw payload (a list is sent as one, without joining it).

    ``request`` is a message, or its bytes; the reply's is parsed as a ``reply_type``, or stays bytes.
    """

    method: int
    request: Body
    reply_type: type[R]
    attachment: Sequence[bytes | bytearray | memoryview] = ()

    @property
    def body(self) -> bytes:
        """Return the request's bytes."""
        return encode(self.request)


@dataclass(slots=True)
class Reply(Generic[R]):
    """An answer: the message, and its payload (a view that stays valid while it is held)."""

    message: R
    attachment: memoryview


class FastConnection:
    """One open connection. Broken by the first failure or missed deadline, and then closed for good.

    A reply of a type in ``on_late`` is delivered even if late: it may carry a resource to be returned. A connection
    broken before the reply came stays open for it alone, see ``take_late``.

    ``dead_s``: calls fail with PeerSilent if the peer's host answers nothing for that time, and `failure` reports it.
    """

    def __init__(
        self,
        address: Address | None,
        unix_path: str | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        shortcut: bool = False,
        tls: TlsFiles = NO_TLS,
        on_late: LateReplies | None = None,
        dead_s: int = 0,
    ) -> None:
        self.peer = unix_path or str(address)
        self._socket = dial(address, unix_path, timeout_s, shortcut=shortcut, tls=tls, dead_s=dead_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._closed = False
        self.timed_out = False  # a call took too long, and so broke the connection
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()  # received and not yet taken
        self._outstanding: dict[int, type[Any]] = {}  # calls without a reply, and the types of their replies
        self._posted: dict[int, Call[Any]] = {}  # of these, the posted ones
        self._on_late = on_late or {}
        try:
            self._socket.sendall(PREAMBLE)
        except OSError as error:
            self.close()
            raise NodeUnavailable(f"{self.peer} closed the connection at once: {error}") from error

    @property
    def closed(self) -> bool:
        """Whether the connection is unusable for calls."""
        return self._closed

    def failure(self) -> NodeUnavailable | None:
        """Return the failure of the connection if the kernel has detected one while it was idle. Never waits."""
        if not self._lock.acquire(blocking=False):
            return None  # the call in progress will report it
        try:
            if self._closed:
                return NodeUnavailable(f"connection to {self.peer} is closed")
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            if not poll.poll(0):
                return None
            number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.close()
            return _failed(self.peer, OSError(number, os.strerror(number) if number else "closed"))
        finally:
            self._lock.release()

    @property
    def has_late_replies(self) -> bool:
        """Whether replies are outstanding that ``on_late`` wants."""
        return not self._on_late.keys().isdisjoint(self._outstanding.values())

    @property
    def unanswered(self) -> list[Call[Any]]:
        """Return posted calls without an answer; if the connection is closed, the peer may not have read them."""
        return list(self._posted.values())

    def take_late(self) -> bool:
        """Take arrived late replies from a broken connection; False, and closed, if no more will come. Never waits."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            self._socket.setblocking(False)
            while self.has_late_replies:
                self._take_abandoned(self._receive_next(_AT_ONCE))
        except DeadlineExceeded:
            return True
        except (TanghuluError, OSError):
            pass
        finally:
            self._lock.release()
        self.close()
        return False

    def _take_abandoned(self, frame: Frame) -> None:
        """Deliver or drop an abandoned reply; raises the error in a reply to no call."""
        reply_type = self._outstanding.pop(frame.call_id, None)
        if reply_type is None:
            raise _stray(self.peer, frame)
        self._posted.pop(frame.call_id, None)
        if reply_type in self._on_late:
            deliver_late(self._on_late, reply_type, outcome_of(reply_type, frame))

    def call(
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
        outcome = self.call_one(Call(method, request, reply_type, attachment), deadline_s=deadline_s)
        if isinstance(outcome, TanghuluError):
            raise outcome
        return outcome

    def call_one(self, call: Call[R], *, deadline_s: float = 5.0) -> Reply[R] | TanghuluError:
        """Do the same as ``call_many`` for one call, with the least work."""
        return self._alone(self._exchange_one, call, deadline_s)

    def call_many(self, calls: Sequence[Call[R]], *, deadline_s: float = 5.0) -> list[Reply[R] | TanghuluError]:
        """Send all of ``calls``, then collect their replies; typed errors of the peer are returned in their place.

        Raises DeadlineExceeded or NodeUnavailable for all of them if the connection fails.
        """
        return self._alone(self._exchange, calls, deadline_s)

    def begin(self, call: Call[R], *, deadline_s: float = 5.0) -> SentCall[R]:
        """Send one request; its reply is taken later. Raises like ``call_many``.

        Until then the connection cannot be used for anything else.
        """
        until = time.monotonic() + deadline_s
        return SentCall(self, call.reply_type, self._alone(self._begin, call, deadline_s), until)

    def end(self, call_id: int, reply_type: type[R], deadline_s: float) -> Reply[R] | TanghuluError:
        """Return the reply to a begun call; raises like ``call_many``."""
        return self._alone(self._end, (call_id, reply_type), deadline_s)

    def _end(self, wanted: tuple[int, type[R]], until: float) -> Reply[R] | TanghuluError:
        call_id, reply_type = wanted
        return outcome_of(reply_type, self._receive((call_id,), until))

    def leave(self, reply_type: type[Any]) -> None:
        """Abandon the reply to a begun call. If it must be taken, the connection is reserved for it."""
        if reply_type in self._on_late:
            self._closed = True

    def post(self, call: Call[R], *, deadline_s: float = 5.0) -> None:
        """Send a request whose reply is dropped on arrival. Raises like ``call_many``."""
        self._alone(self._post, call, deadline_s)

    def _alone(self, exchange: Callable[[Q, float], A], wanted: Q, deadline_s: float) -> A:
        until = time.monotonic() + deadline_s
        if not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=max(deadline_s, 0.0))):
            raise DeadlineExceeded(
                f"other calls kept the connection to {self.peer} busy for more than {deadline_s:g} s"
            )
        try:
            if self._closed:
                raise NodeUnavailable(f"connection to {self.peer} is closed")
            return exchange(wanted, until)
        except BaseException as error:
            # An interrupt, too: outstanding replies would be taken for those of later calls, so this connection is
            # spent. Everything is re-raised.
            if isinstance(error, OSError | NodeUnavailable) or not self.has_late_replies:
                self.close()
            self._closed = True
            self.timed_out = isinstance(error, DeadlineExceeded)
            if isinstance(error, OSError):
                raise _failed(self.peer, error) from error
            raise
        finally:
            self._lock.release()

    def _begin(self, call: Call[Any], until: float) -> int:
        """Send ``call`` and return its id: it is outstanding until its reply is taken, whatever interrupts us."""
        call_id = call_id_of(next(self._numbers))
        self._outstanding[call_id] = call.reply_type
        self._send(call, call_id, until)
        return call_id

    def _exchange_one(self, call: Call[R], until: float) -> Reply[R] | TanghuluError:
        call_id = self._begin(call, until)
        return outcome_of(call.reply_type, self._receive((call_id,), until))

    def _post(self, call: Call[R], until: float) -> None:
        while len(self._outstanding) >= _MAX_ABANDONED:
            self._take_abandoned(self._receive_next(until))
        call_id = call_id_of(next(self._numbers))
        self._outstanding[call_id], self._posted[call_id] = call.reply_type, call
        self._send(call, call_id, until)

    def _exchange(self, calls: Sequence[Call[R]], until: float) -> list[Reply[R] | TanghuluError]:
        outcomes: dict[int, Reply[R] | TanghuluError] = {}
        pending: dict[int, tuple[int, int]] = {}  # call id -> (index, bytes of the request)
        in_flight_bytes = 0

        def take_reply() -> int:
            frame = self._receive(pending, until)
            index, size = pending.pop(frame.call_id)
            outcomes[index] = outcome_of(calls[index].reply_type, frame)
            return size

        try:
            for index, call in enumerate(calls):
                call = Call(call.method, call.body, call.reply_type, call.attachment)
                size = len(call.body) + sum([memoryview(part).nbytes for part in call.attachment])
                while pending and in_flight_bytes + size > _WINDOW_BYTES:
                    in_flight_bytes -= take_reply()
                in_flight_bytes += size
                pending[self._begin(call, until)] = (index, size)
            while pending:
                take_reply()
        except BaseException:  # an interrupt, too; everything is re-raised
            for index, outcome in outcomes.items():
                deliver_late(self._on_late, calls[index].reply_type, outcome)
            raise
        return [outcomes[index] for index in range(len(calls))]

    def _send(self, call: Call[Any], call_id: int, until: float) -> None:
        """Send with one system call in the usual case, whatever the attachment."""
        body, attachment = call.body, call.attachment
        size = sum([memoryview(part).nbytes for part in attachment]) if attachment else 0
        head = encode_head(call.method, call_id, len(body), size) + body
        parts = [head, *attachment][:_MAX_PARTS]
        sent = 0
        while not sent:
            try:
                sent = self._socket.sendmsg(parts) if attachment else self._socket.send(head)
            except BlockingIOError:
                self._check_deadline(until)
        if sent == len(head) + size:
            return
        for part in (head, *attachment):
            view = memoryview(part).cast("B")
            self._send_all(view[sent:], until)
            sent = max(0, sent - len(view))

    def _send_all(self, view: memoryview, until: float) -> None:
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._check_deadline(until)

    def _receive(self, awaited: Container[int], until: float) -> Frame:
        """Return the next reply to one of the calls ``awaited``, and take the abandoned ones before it."""
        while True:
            frame = self._receive_next(until)
            if frame.call_id in awaited:
                del self._outstanding[frame.call_id]
                return frame
            self._take_abandoned(frame)

    def _receive_next(self, until: float) -> Frame:
        """Return the next frame, with one system call if it is small and there already.

        What has arrived of a frame is kept when the time is up, or an interrupt ends the wait.
        """
        frames, reader = self._frames, self._reader
        while not frames:
            partial = reader.partial
            if partial is not None:
                partial.filled(self._receive_into(partial.rest, until))
                if not partial.missing:
                    frames.append(reader.finish())
                else:
                    self._check_deadline(until)
                continue
            data = self._receive_some(until)
            only = reader.whole(data)
            if only is not None:
                return only
            frames.extend(reader.feed(data))
        return frames.popleft()

    def _receive_some(self, until: float) -> bytes:
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                self._check_deadline(until)
                continue
            if not data:
                raise NodeUnavailable(f"{self.peer} closed the connection")
            return data

    def _receive_into(self, rest: memoryview, until: float) -> int:
        while True:
            try:
                count = self._socket.recv_into(rest)
            except BlockingIOError:
                self._check_deadline(until)
                continue
            if not count:
                raise NodeUnavailable(f"{self.peer} closed the connection")
            return count

    def _check_deadline(self, until: float) -> None:
        if time.monotonic() >= until:
            raise DeadlineExceeded(f"{self.peer} did not answer in time")

    def finish(self, deadline_s: float) -> None:
        """Close the socket when the posted requests have been answered, or at the deadline.

        After an earlier close, the peer may lose what it has not read yet: its first answer fails.
        """
        until = time.monotonic() + deadline_s
        if self._lock.acquire(blocking=False):
            try:
                while self._outstanding and not self._closed:
                    self._take_abandoned(self._receive_next(until))
            except (TanghuluError, OSError):
                pass
            finally:
                self._lock.release()
        self.close()

    def close(self) -> None:
        """Close the socket; later calls raise NodeUnavailable."""
        self._closed = True
        self._socket.close()

    def __repr__(self) -> str:
        return f"FastConnection({self.peer}{', closed' if self._closed else ''})"


@dataclass(slots=True)
class SentCall(Generic[R]):
    """A request in progress on ``connection``. ``close`` it, with or without ``end``, so that others may use it."""

    connection: FastConnection
    _reply_type: type[R]
    _call_id: int
    _until: float
    _open: bool = True

    def end(self) -> Reply[R] | TanghuluError:
        """Wait for the reply; a failure of the connection is returned, too."""
        self._open = False
        try:
            return self.connection.end(self._call_id, self._reply_type, max(self._until - time.monotonic(), 0.0))
        except TanghuluError as error:
            return error

    def close(self) -> None:
        """Abandon the reply if it has not been taken."""
        if self._open:
            self._open = False
            self.connection.leave(self._reply_type)


def deliver_late(on_late: LateReplies, reply_type: type[Any], outcome: Reply[Any] | TanghuluError) -> None:
    """Deliver a reply that nobody waits for any more."""
    deliver = on_late.get(reply_type)
    if deliver is not None and isinstance(outcome, Reply):
        deliver(outcome.message)


def _failed(peer: str, error: OSError) -> NodeUnavailable:
    kind = PeerSilent if is_silence(error) else NodeUnavailable
    return kind(f"connection to {peer} failed: {error}")


def _stray(peer: str, frame: Frame) -> TanghuluError:
    """Return the error in a reply to no call: with id 0 the peer states why it ends the connection."""
    if frame.call_id == 0 and frame.method == ERROR:
        return error_in(frame)
    return InvalidRequest(f"{peer} answered call {frame.call_id}, which was never made")


def error_in(frame: Frame) -> TanghuluError:
    """Return the typed error in an ERROR frame; raises InvalidRequest for invalid bytes."""
    return parser_of(Failure)(frame.body).error


def outcome_of(reply_type: type[R], frame: Frame) -> Reply[R] | TanghuluError:
    """Return the reply in ``frame``, or the peer's typed error; raises InvalidRequest for bytes that are neither."""
    if frame.method == ERROR:
        return error_in(frame)
    return Reply(parser_of(reply_type)(frame.body), memoryview(frame.attachment))
