"""One agent of the client and the tcp connection that belongs to it: set up, posted to, polled, given up.

Owns both. Raises ConnectionBroken when they cannot be used any more; who uses it then, and what is tried instead, is
decided elsewhere. Nothing here waits, but making and closing an agent for some milliseconds, and ``shut`` for a bounded
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import secrets
import select
import socket
import time
from collections import deque
from typing import NamedTuple

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.buffers import Buffer
from tanghulu.transfer_engine.fences import Fences
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.segment import SegmentDescriptor
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.transport import Arrived, Completion, Refused
from tanghulu.transfer_engine.ucx_agent import Agent, Registration, Transfer
from tanghulu.transfer_engine.ucx_wire import UcxAnswer, UcxOp, UcxRequest, parse_answer
from tanghulu.transfer_engine.wire import MalformedMessage, name_hash, typed_error
from tanghulu.types import Address

#: Buffers up to this size are copied through memory that is registered already.
STAGED_BYTES = 64 << 10
NUM_SLOTS = 16
#: How long giving up waits for the owner's word that its end is closed too.
CLOSE_WAIT_S = 0.2


class ConnectionBroken(Exception):
    """The connection is of no use any more; ``error`` says why, in the caller's terms."""

    def __init__(self, error: TanghuluError) -> None:
        super().__init__(error.message)
        self.error = error


class _Posted(NamedTuple):
    piece: Slice
    slot: int | None
    transfer: Transfer


class UcxConnection:
    """An agent on ``path``; it starts to connect at once, and posts when it is connected and fences are told."""

    def __init__(self, path: Path, fences: Fences, descriptor: SegmentDescriptor, session_id: int) -> None:
        """Raises NodeUnavailable if there is no NIXL or no address, TransferFailed."""
        self.path = path
        self.token = secrets.randbits(63) | 1
        self.ready = False
        self._fences = fences
        self._num_fences = 0
        self._pending: deque[Slice] = deque()
        self._posted: list[_Posted] = []
        self._expected: deque[UcxRequest] = deque()
        self._leased = False  # whether the owner keeps leases
        self._leases: dict[int, TanghuluError | None] = {}  # what the owner said about those that were asked
        self._out = b""
        self._in = bytearray()
        self._peer = ""
        self._segment_address = 0
        self._sock = _start_connecting(Address.parse(path.endpoint.address))
        try:
            self._agent = Agent(f"client-{self.token:x}", serves=False)
        except TanghuluError:
            self._sock.close()
            raise
        self._staging = Buffer(mmap.mmap(-1, NUM_SLOTS * STAGED_BYTES))
        self._staged = self._agent.register(self._staging.address, self._staging.size_bytes)
        self._slots = list(range(NUM_SLOTS))
        name = name_hash(descriptor.name)
        self._ask(UcxRequest(UcxOp.CONNECT, self.token, session_id, descriptor.generation, name))

    # --- what the link asks

    def fileno(self) -> int:
        """The control connection's descriptor."""
        return self._sock.fileno()

    @property
    def interest(self) -> int:
        """The events of the control connection that matter now."""
        return select.EPOLLIN | (select.EPOLLOUT if self._out else 0)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._pending or self._posted or self._expected)

    @property
    def has_slices(self) -> bool:
        """Whether a slice is under way."""
        return bool(self._pending or self._posted)

    @property
    def moving(self) -> bool:
        """Whether UCX has something to do, which no descriptor tells."""
        return bool(self._posted)

    def queue(self, piece: Slice) -> None:
        """Post the slice when ``advance`` is called next, or as soon after as it can be."""
        self._pending.append(piece)

    def advance(self, ended: list[Completion]) -> None:
        """Move bytes along, take what ended, post what is pending; append what ended."""
        if self._posted:
            self._collect(ended)
        if self._pending and self.ready:
            self._ask_first()
            if not self._expected:
                self._post(ended)

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
        """Close both ends: afterwards nothing lands here, and no WRITE of it lands at the owner.

        The owner's word for that is waited for CLOSE_WAIT_S at most, and only if a WRITE was under way; where it does
        not come, the token becomes a fence, which every later slice to that owner waits for.
        """
        writing = any(each.piece.opcode is Opcode.WRITE for each in self._posted)
        self._posted.clear()
        self._pending.clear()
        self._agent.close()
        self._staged.close()
        if writing and not self._hear_closed():
            self._fences.add(self.token)
        self._sock.close()

    # --- inside: the agent

    def _post(self, ended: list[Completion]) -> None:
        while self._pending:
            piece = self._pending[0]
            refusal = self._leases.get(piece.lease_id)
            if refusal is not None:
                self._pending.popleft()
                ended.append(Refused(piece.slice_id, refusal))
                continue
            staged = piece.buffer.size_bytes <= STAGED_BYTES
            if staged and not self._slots:
                return
            try:
                self._post_one(piece, self._slots.pop() if staged else None)
            except TanghuluError as error:
                raise ConnectionBroken(self._told(error)) from None
            self._pending.popleft()

    def _post_one(self, piece: Slice, slot: int | None) -> None:
        local = piece.buffer.address + piece.local_offset
        if slot is None:
            self._register(piece.buffer)
        else:
            if piece.opcode is Opcode.WRITE:
                ctypes.memmove(self._slot_address(slot), local, piece.length)
            local = self._slot_address(slot)
        remote = self._segment_address + piece.remote_offset
        transfer = self._agent.post(piece.opcode, self._peer, local, remote, piece.length)
        self._posted.append(_Posted(piece, slot, transfer))

    def _register(self, buffer: Buffer) -> None:
        """Once for each buffer and agent; what closed agents had is forgotten with the next."""
        if self.token in buffer.regions:
            return
        for key, region in list(buffer.regions.items()):
            if isinstance(region, Registration) and (region.agent is None or region.agent.closed):
                buffer.regions.pop(key, None)
        buffer.regions[self.token] = self._agent.register(buffer.address, buffer.size_bytes)

    def _slot_address(self, slot: int) -> int:
        return self._staging.address + slot * STAGED_BYTES

    def _collect(self, ended: list[Completion]) -> None:
        still: list[_Posted] = []
        try:
            for each in self._posted:
                if not each.transfer.done():
                    still.append(each)
                    continue
                each.transfer.release()
                self._finish(each)
                ended.append(Arrived(each.piece.slice_id))
        except TanghuluError as error:
            raise ConnectionBroken(self._told(error)) from None
        self._posted = still

    def _finish(self, done: _Posted) -> None:
        if done.slot is None:
            return
        piece = done.piece
        if piece.opcode is Opcode.READ:
            local = piece.buffer.address + piece.local_offset
            ctypes.memmove(local, self._slot_address(done.slot), piece.length)
        self._slots.append(done.slot)

    def _told(self, error: TanghuluError) -> TanghuluError:
        return type(error)(f"{self.path.label}: {error.message}")

    # --- inside: the control connection

    def _ask(self, request: UcxRequest) -> None:
        self._expected.append(request)
        self._out += request.pack()

    def _ask_first(self) -> None:
        """Tell the fences, and ask for leases that this connection has not used yet; posting waits for the answers."""
        num_told, tokens = self._fences.since(self._num_fences)
        self._num_fences = num_told
        for token in tokens:
            self._ask(UcxRequest(UcxOp.FENCE, token))
        if self._leased:
            for lease_id in {piece.lease_id for piece in self._pending} - self._leases.keys():
                self._leases[lease_id] = None
                self._ask(UcxRequest(UcxOp.ADMIT, lease_id))
        if self._out:
            self.serve_control(select.EPOLLOUT)

    def _receive(self) -> None:
        data = self._sock.recv(1 << 16)
        if not data:
            raise ConnectionBroken(NodeUnavailable(f"{self.path.label}: the owner closed the connection"))
        self._in += data
        while (answer := parse_answer(self._in)) is not None:
            self._answered(answer)

    def _answered(self, answer: UcxAnswer) -> None:
        if not self._expected or self._expected[0].op is not answer.op:
            raise MalformedMessage(f"an answer to {answer.op.name} that nobody asked")
        request = self._expected.popleft()
        if request.op is UcxOp.ADMIT:
            self._leases[request.token] = answer.refusal
        elif answer.refusal is not None:
            raise ConnectionBroken(answer.refusal)
        if answer.op is not UcxOp.CONNECT:
            return
        try:
            self._peer = self._agent.connect(answer.metadata)
        except TanghuluError as error:
            raise ConnectionBroken(self._told(error)) from None
        self._segment_address, self._leased = answer.address, answer.leased
        self.ready = True

    def _hear_closed(self) -> bool:
        """Ask the owner to close its end; whether it said so in time."""
        until_s = time.monotonic() + CLOSE_WAIT_S
        self._ask(UcxRequest(UcxOp.CLOSE, self.token))
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
        raise NodeUnavailable(f"ucx door {address}: {error}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.connect_ex(where)
    return sock
