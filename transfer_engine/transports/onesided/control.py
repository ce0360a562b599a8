"""Client's control connection of a transport that bypasses the owner's process: requests, in order.

Owns the socket, the connection's token, and which fences and leases were sent. Raises ConnectionBroken when it cannot
be used any more. Nothing here waits, but ``receive_closed`` for a bounded time.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Opcode, Slice
from tanghulu.transfer_engine.core.transport import ConnectContext, ConnectionBroken
from tanghulu.transfer_engine.core.wire import MalformedMessage, name_hash, secret_numbers, typed_error
from tanghulu.transfer_engine.transports.onesided.wire import ControlAnswer, ControlOp, ControlRequest, Dialect
from tanghulu.transfer_engine.transports.tcp.sockets import connect
from tanghulu.types import Address

#: Most seconds for which giving up waits for the owner to confirm that its end is closed too.
CLOSE_WAIT_S = 0.2


class Digested(NamedTuple):
    """The owner's answer about a landed slice: the checksum of its range there, or the reason for none."""

    piece: Slice
    digest: int
    refusal: TanghuluError | None


#: Leases whose answers are kept; beyond that, those without a pending slice are dropped, and requested again if used.
_MAX_KNOWN_LEASES = 1024
#: Most bytes taken from the connection at once.
_PIECE_BYTES = 1 << 16


class _Expected(NamedTuple):
    request: ControlRequest
    piece: Slice | None = None


class Control:
    """A connection on ``path``; it starts to connect at once, and the first request is ``connect``."""

    def __init__(self, path: Path, dialect: Dialect, context: ConnectContext) -> None:
        """Start to connect; raises NodeUnavailable if there is no address, ConfigError for bad files of TLS."""
        self.token = secrets.randbits(63) | 1
        #: The owner's grant of the CONNECT, once it has answered.
        self.granted: bytes | None = None
        #: By requested lease, also of all pending slices: why nothing may be posted under it; None if it may.
        self.refusals: dict[int, TanghuluError | None] = {}
        self._path, self._dialect, self._fences = path, dialect, context.fences
        self._descriptor, self._session = context.descriptor, context.session
        self._num_fences = 0
        self._expected: deque[_Expected] = deque()
        self._num_ahead = 0  # of them, those for which slices wait
        self._digested: list[Digested] = []
        self._leased = False  # whether the owner keeps leases
        self._out = b""
        self._in = bytearray()
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        address = Address.parse(path.endpoint.address)
        self._sock = connect(path.label, address, context.config.tls)

    # --- for the connection

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    @property
    def interest(self) -> int:
        """Epoll events of interest now."""
        return select.EPOLLIN | (select.EPOLLOUT if self._out else 0)

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._expected)

    @property
    def num_comparing(self) -> int:
        """Slices with a pending request for their digest, and answers about them not yet taken."""
        return len(self._expected) - self._num_ahead + len(self._digested)

    def connect(self, payload: bytes) -> None:
        """Request the owner's end; ``granted`` is set when it has answered."""
        self._request(
            ControlRequest(
                ControlOp.CONNECT, self.token, self._session.session_id, self._descriptor.generation,
                name_hash(self._descriptor.name), *secret_numbers(self._session.secret), payload=payload,
            )
        )  # fmt: skip

    def clears(self, pieces: Collection[Slice]) -> bool:
        """Return whether slices may be posted: fences sent, and newly used leases requested."""
        num_seen, tokens = self._fences.since(self._num_fences)
        self._num_fences = num_seen
        for token in tokens:
            self._request(ControlRequest(ControlOp.FENCE, token))
        if self._leased:
            leases = {piece.lease_id for piece in pieces}
            if len(self.refusals) > _MAX_KNOWN_LEASES:
                self.refusals = {each: self.refusals[each] for each in leases & self.refusals.keys()}
            for lease_id in leases - self.refusals.keys():
                self.refusals[lease_id] = None
                self._request(ControlRequest(ControlOp.ADMIT, lease_id))
        self._send()
        return self._num_ahead == 0

    def request_digest(self, piece: Slice) -> None:
        """Have the owner compute the checksum of the slice's range; ``take_digested`` returns it."""
        op = ControlOp.READ if piece.opcode is Opcode.READ else ControlOp.WRITTEN
        self._request(ControlRequest(op, piece.lease_id, offset=piece.remote_offset, length=piece.length), piece)
        self._send()

    def take_digested(self) -> list[Digested]:
        """Return the owner's answers since the last call."""
        digested, self._digested = self._digested, []
        return digested

    def serve(self, events: int) -> None:
        """Move bytes."""
        try:
            if self._out and events & ~select.EPOLLIN:
                self._out = self._out[self._sock.send(self._out, socket.MSG_DONTWAIT) :]
            if events & ~select.EPOLLOUT:
                self._receive()
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionBroken(NodeUnavailable(f"{self._path.label}: {error}")) from error
        except MalformedMessage as error:
            raise ConnectionBroken(typed_error(error, self._path.label)) from error

    def receive_closed(self) -> bool:
        """Request the owner to close its end; return whether it confirmed in time."""
        until_s = time.monotonic() + CLOSE_WAIT_S
        self._request(ControlRequest(ControlOp.CLOSE, self.token))
        waiter = select.poll()
        with contextlib.suppress(ConnectionBroken):
            while self._expected:
                left_s = until_s - time.monotonic()
                waiter.register(self._sock, self.interest)
                if left_s <= 0 or not waiter.poll(left_s * 1000):
                    return False
                self.serve(select.EPOLLIN | select.EPOLLOUT)
            return True
        return False

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        self._expected.clear()
        self._digested.clear()
        self._num_ahead = 0

    def check(self) -> None:
        """Assert the invariants: expected answers are counted."""
        assert self._num_ahead == sum(each.piece is None for each in self._expected)

    # --- inside

    def _request(self, request: ControlRequest, piece: Slice | None = None) -> None:
        self._expected.append(_Expected(request, piece))
        self._num_ahead += piece is None
        self._out += self._dialect.pack_request(request)

    def _send(self) -> None:
        if self._out:
            self.serve(select.EPOLLOUT)

    def _receive(self) -> None:
        buffer, got = self._buffer, _PIECE_BYTES
        while got == _PIECE_BYTES:  # no poller sees what TLS has decrypted
            try:
                got = self._sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not got:
                raise ConnectionBroken(NodeUnavailable(f"{self._path.label}: the owner closed the connection"))
            self._in += buffer[:got]
        while (answer := self._dialect.take_answer(self._in)) is not None:
            self._on_answer(answer)

    def _on_answer(self, answer: ControlAnswer) -> None:
        if not self._expected or self._expected[0].request.op is not answer.op:
            raise MalformedMessage(f"an answer to {answer.op.name}, which was not requested")
        request, piece = self._expected.popleft()
        if piece is not None:
            self._digested.append(Digested(piece, answer.digest, answer.refusal))
            return
        self._num_ahead -= 1
        if request.op is ControlOp.ADMIT:
            self.refusals[request.number] = answer.refusal
        elif answer.refusal is not None:
            raise ConnectionBroken(answer.refusal)
        elif request.op is ControlOp.CONNECT:
            self._leased, self.granted = answer.leased, answer.payload
