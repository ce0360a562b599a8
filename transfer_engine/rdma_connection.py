"""One queue pair of the client and the tcp connection that belongs to it: set up, posted to, polled, given up.

Owns both and the order of what is posted. Raises ConnectionBroken when they cannot be used any more; who uses it then,
and what is tried instead, is decided elsewhere. Nothing here waits, but ``shut`` for a bounded time.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tanghulu.errors import InvalidRequest, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.fences import Fences
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.rdma_devices import STAGED_BYTES, LocalDevices, Staging
from tanghulu.transfer_engine.rdma_set_up import SetUp
from tanghulu.transfer_engine.rdma_wire import (
    ANSWER_BYTES,
    RdmaAnswer,
    RdmaOp,
    RdmaRequest,
    check_answer,
    parse_answer,
    parse_error,
)
from tanghulu.transfer_engine.rdma_works import Completed, Work, which_tell
from tanghulu.transfer_engine.segment import SegmentDescriptor
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.transport import Arrived, Completion, Refused
from tanghulu.transfer_engine.wire import MalformedMessage, name_hash, typed_error
from tanghulu.types import Address

#: Works that a queue pair holds; the engine's windows are smaller.
MAX_WORKS = 256
#: How long giving up waits for what was posted to end.
FLUSH_WAIT_S = 0.2
#: How long giving up waits for the owner's word that its end is destroyed too.
CLOSE_WAIT_S = 0.2


class ConnectionBroken(Exception):
    """The connection is of no use any more; ``error`` says why, in the caller's terms."""

    def __init__(self, error: TanghuluError) -> None:
        super().__init__(error.message)
        self.error = error


class _Posted(NamedTuple):
    piece: Slice
    slot: int | None


class RdmaConnection:
    """A queue pair on ``path``; it starts to connect at once, and posts when it is connected and fences are told."""

    def __init__(
        self,
        path: Path,
        devices: LocalDevices,
        staging: Staging,
        fences: Fences,
        descriptor: SegmentDescriptor,
        session_id: int,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called from a thread when ``advance`` has something to do that no descriptor tells.

        Raises NodeUnavailable or TransferFailed if there is no queue pair or no address.
        """
        self.path = path
        self.token = secrets.randbits(63) | 1
        self.ready = False
        self.watched = 0  # the events that the link's epoll was told to look for
        self._devices, self._staging, self._fences, self._wake = devices, staging, fences, wake
        self._set_up: SetUp | None = None
        self._pending: deque[Slice] = deque()
        self._posted: deque[_Posted] = deque()
        self._expected: deque[RdmaRequest] = deque()
        self._leased = False  # whether the owner keeps leases
        self._leases: dict[int, TanghuluError | None] = {}  # what the owner said about those that were asked
        self._out = b""
        self._in = bytearray()
        self._segment_address = self._segment_key = 0
        self._num_fences = 0
        self._sock = _start_connecting(Address.parse(path.endpoint.address))
        try:
            self._pair = devices.device(path.local_device).queue_pair(MAX_WORKS)
        except TanghuluError:
            self._sock.close()
            raise
        self._ask(
            RdmaRequest(
                RdmaOp.CONNECT, self.token, session_id, descriptor.generation, name_hash(descriptor.name),
                path.endpoint.device, self._pair.address,
            )
        )  # fmt: skip

    # --- what the link asks

    @property
    def descriptors(self) -> tuple[int, int]:
        """(the control connection's, the completions')."""
        return self._sock.fileno(), self._pair.fileno()

    @property
    def interest(self) -> int:
        """The epoll events of the control connection that matter now."""
        return select.EPOLLIN | (select.EPOLLOUT if self._out else 0)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._pending or self._posted or self._expected)

    @property
    def has_slices(self) -> bool:
        """Whether a slice is under way."""
        return bool(self._pending or self._posted)

    def queue(self, piece: Slice) -> None:
        """Post the slice when ``advance`` is called next, or as soon after as it can be."""
        self._pending.append(piece)

    def advance(self, ended: list[Completion]) -> None:
        """Take completions, post what is pending; append what ended."""
        if self._set_up is not None and self._set_up.done:
            self._take_set_up(self._set_up)
        if self._posted:
            self._collect(ended)
        if self._pending and self.ready:
            self._ask_first()
            if not self._expected:
                self._post(ended)

    def arm(self) -> None:
        """Have the completions' descriptor tell the next completion."""
        if self._posted:
            self._pair.arm()

    def woken(self) -> None:
        """The completions' descriptor is readable."""
        self._pair.woken()

    def serve_control(self, events: int) -> None:
        """Move bytes of the control connection."""
        try:
            if self._out and events & ~select.EPOLLIN:
                self._out = self._out[self._sock.send(self._out) :]
            if events & ~select.EPOLLOUT:
                self._receive()
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionBroken(NodeUnavailable(f"{self.path.label}: {error}")) from error
        except MalformedMessage as error:
            raise ConnectionBroken(typed_error(error, self.path.label)) from error

    def shut(self) -> None:
        """Destroy both ends: afterwards nothing lands here, and no WRITE of it lands at the owner.

        The owner's word for that is waited for CLOSE_WAIT_S at most, and only if a WRITE was under way; where it does
        not come, the token becomes a fence, which every later slice to that owner waits for.
        """
        if self._posted:
            self._pair.flush(self._posted[-1].piece.slice_id, FLUSH_WAIT_S)
        if self._set_up is None:
            self._pair.close()
        else:
            self._set_up.abandon()
        writing = any(each.piece.opcode is Opcode.WRITE for each in self._posted)
        for each in self._posted:
            if each.slot is not None:
                self._staging.put(each.slot)
        self._posted.clear()
        self._pending.clear()
        if writing and not self._hear_closed():
            self._fences.add(self.token)
        self._sock.close()

    # --- inside: the queue pair

    def _post(self, ended: list[Completion]) -> None:
        works: list[Work] = []
        while self._pending and len(self._posted) < MAX_WORKS:
            refusal = self._leases.get(self._pending[0].lease_id)
            if refusal is not None:
                ended.append(Refused(self._pending.popleft().slice_id, refusal))
                continue
            work = self._work(self._pending[0])
            if work is None:
                break
            self._pending.popleft()
            works.append(work)
        if not works:
            return
        try:
            self._pair.post(works, which_tell([work.length for work in works]))
        except TransferFailed as error:
            raise ConnectionBroken(error) from error

    def _work(self, piece: Slice) -> Work | None:
        """The slice as a work, noted as posted; None while no staging slot is free."""
        slot: int | None = None
        if piece.buffer.size_bytes <= STAGED_BYTES:
            slot = self._staging.take()
            if slot is None:
                return None
            address, key = self._staging.address(slot), self._staging.key
            if piece.opcode is Opcode.WRITE:
                self._staging.fill(slot, piece.buffer, piece.local_offset, piece.length)
        else:
            address = piece.buffer.address + piece.local_offset
            key = self._key(piece)
        self._posted.append(_Posted(piece, slot))
        remote = self._segment_address + piece.remote_offset
        return Work(piece.slice_id, piece.opcode, address, key, remote, self._segment_key, piece.length)

    def _key(self, piece: Slice) -> int:
        try:
            return self._devices.region(self.path.local_device, piece.buffer).local_key
        except TanghuluError as error:
            raise ConnectionBroken(error) from error

    def _collect(self, ended: list[Completion]) -> None:
        for completed in self._pair.poll():
            if completed.fault:
                self._failed(completed, ended)
            while self._posted:
                done = self._posted.popleft()
                self._finish(done)
                ended.append(Arrived(done.piece.slice_id))
                if done.piece.slice_id == completed.work_id:
                    break

    def _finish(self, done: _Posted) -> None:
        if done.slot is None:
            return
        piece = done.piece
        if piece.opcode is Opcode.READ:
            self._staging.empty(done.slot, piece.buffer, piece.local_offset, piece.length)
        self._staging.put(done.slot)

    def _failed(self, completed: Completed, ended: list[Completion]) -> None:
        """One operation failed, and with it the queue pair. A fault of the request is not tried again."""
        told = f"{self.path.label}: {completed.fault}"
        guilty = next((each for each in self._posted if each.piece.slice_id == completed.work_id), None)
        if completed.access and guilty is not None:
            self._posted.remove(guilty)
            if guilty.slot is not None:
                self._staging.put(guilty.slot)
            ended.append(Refused(guilty.piece.slice_id, InvalidRequest(f"{told}; the range is not the segment's")))
        raise ConnectionBroken(NodeUnavailable(told) if "RETRY" in completed.fault else TransferFailed(told))

    # --- inside: the control connection

    def _ask(self, request: RdmaRequest) -> None:
        self._expected.append(request)
        self._out += request.pack()

    def _ask_first(self) -> None:
        """Tell the fences, and ask for leases that this connection has not used yet; posting waits for the answers."""
        num_told, tokens = self._fences.since(self._num_fences)
        self._num_fences = num_told
        for token in tokens:
            self._ask(RdmaRequest(RdmaOp.FENCE, token))
        if self._leased:
            for lease_id in {piece.lease_id for piece in self._pending} - self._leases.keys():
                self._leases[lease_id] = None
                self._ask(RdmaRequest(RdmaOp.ADMIT, lease_id))
        if self._out:
            self.serve_control(select.EPOLLOUT)

    def _receive(self) -> None:
        data = self._sock.recv(1 << 16)
        if not data:
            raise ConnectionBroken(NodeUnavailable(f"{self.path.label}: the owner closed the connection"))
        self._in += data
        check_answer(self._in)
        while len(self._in) >= ANSWER_BYTES:
            answer = parse_answer(self._in[:ANSWER_BYTES])
            end = ANSWER_BYTES + answer.text_bytes
            if len(self._in) < end:
                return
            text = bytes(self._in[ANSWER_BYTES:end])
            del self._in[:end]
            self._answered(answer, parse_error(text) if text else None)

    def _answered(self, answer: RdmaAnswer, refusal: TanghuluError | None) -> None:
        if not self._expected or self._expected[0].op is not answer.op:
            raise MalformedMessage(f"an answer to {answer.op.name} that nobody asked")
        request = self._expected.popleft()
        if refusal is not None and request.op is not RdmaOp.ADMIT:
            raise ConnectionBroken(refusal)
        if request.op is RdmaOp.ADMIT:
            self._leases[request.token] = refusal
        if answer.op is not RdmaOp.CONNECT:
            return
        self._segment_address, self._segment_key = answer.segment_address, answer.segment_key
        self._leased = answer.leased
        self._set_up = SetUp(self._pair, answer.address, self._devices, self._wake)

    def _take_set_up(self, set_up: SetUp) -> None:
        if set_up.error is not None:
            raise ConnectionBroken(set_up.error) from set_up.error
        self._set_up = None
        self.ready = True

    def _hear_closed(self) -> bool:
        """Ask the owner to destroy its end; whether it said so in time."""
        until_s = time.monotonic() + CLOSE_WAIT_S
        self._ask(RdmaRequest(RdmaOp.CLOSE, self.token))
        waiter = select.poll()
        with contextlib.suppress(ConnectionBroken):
            while self._expected:
                left_s = until_s - time.monotonic()
                waiter.register(self._sock, self.interest)
                if left_s <= 0 or not waiter.poll(left_s * 1000):
                    return False
                self.serve_control(select.EPOLLIN | select.EPOLLOUT)
            return True
        return False


def _start_connecting(address: Address) -> socket.socket:
    """Raises NodeUnavailable if the name has no address."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise NodeUnavailable(f"rdma door {address}: {error}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.connect_ex(where)
    return sock
