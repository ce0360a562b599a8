"""A client's mover with its control connection: set up, posted to, polled and given up together.

Owns the order of a slice's steps: it waits until the owner's end is reached, fences are sent and its lease was
requested; it is posted; it lands; and if it is verified, the owner reports the checksum of its range, and both sides
are compared. A ``Mover`` moves the bytes of an end. Raises ConnectionBroken when the two cannot be used any more; their
users, and the alternatives, are decided elsewhere.

Small buffers are copied through ``StagedSlots``, memory registered in advance: registering them would cost more.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

from tanghulu.errors import ChecksumMismatch, TanghuluError
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Opcode, Slice
from tanghulu.transfer_engine.core.transport import Arrived, Completion, ConnectionBroken, Corrupt, Fences, Refused
from tanghulu.transfer_engine.core.wire import MalformedMessage, digest_of, typed_error
from tanghulu.transfer_engine.transports.onesided.control import Control, Digested

#: Largest buffer that is copied through a slot.
STAGED_BYTES = 64 << 10


class StagedSlots:
    """``num_slots`` places of STAGED_BYTES; used by one thread at a time."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.memory = Buffer(mmap.mmap(-1, num_slots * STAGED_BYTES))
        self._free = list(range(num_slots))

    def has_room_for(self, piece: Slice) -> bool:
        """Return whether the slice needs no slot, or one is free."""
        return piece.buffer.size_bytes > STAGED_BYTES or bool(self._free)

    def take(self, piece: Slice) -> int | None:
        """Return a slot for the slice, holding a WRITE's bytes; None for a large buffer. See ``has_room_for`` first."""
        if piece.buffer.size_bytes > STAGED_BYTES:
            return None
        slot = self._free.pop()
        if piece.opcode is Opcode.WRITE:
            ctypes.memmove(self.address(slot), piece.buffer.address + piece.local_offset, piece.length)
        return slot

    def put(self, slot: int, arrived: Slice | None = None) -> None:
        """Take back an untouched slot; a READ that has ``arrived`` there is copied to its destination."""
        if arrived is not None and arrived.opcode is Opcode.READ:
            ctypes.memmove(arrived.buffer.address + arrived.local_offset, self.address(slot), arrived.length)
        self._free.append(slot)

    def address(self, slot: int) -> int:
        """Return the address at which the slot begins."""
        return self.memory.address + slot * STAGED_BYTES

    def check(self) -> None:
        """Assert the invariants: no slot is free twice."""
        assert len(set(self._free)) == len(self._free) <= self.num_slots

    @property
    def idle(self) -> bool:
        """Whether no slot is in use."""
        return len(self._free) == self.num_slots


class Posted(NamedTuple):
    """A slice on its way: its staging slot if it has one, and the transport's handle of its transfer."""

    piece: Slice
    slot: int | None
    transfer: Any = None


class Mover(ABC):
    """The client's end of a one-sided transport: a queue pair, an agent. Used by one thread at a time.

    Small slices go through ``slots``. Raises NodeUnavailable or TransferFailed when it cannot be used any more.
    """

    def __init__(self, slots: StagedSlots, connect_payload: bytes = b"") -> None:
        #: What the owner needs to make its end.
        self.connect_payload = connect_payload
        #: Whether slices may be posted.
        self.ready = False
        self._slots = slots
        self._posted: deque[Posted] = deque()

    @abstractmethod
    def connect(self, granted: bytes) -> None:
        """Reach the owner's end; ``ready`` once that is done. Also raises MalformedMessage."""

    def advance(self) -> None:  # noqa: B027 - not every transport needs more than ``connect``
        """Continue connecting."""

    def has_room_for(self, piece: Slice) -> bool:
        """Return whether the slice can be posted now."""
        return self._slots.has_room_for(piece)

    @abstractmethod
    def post(self, piece: Slice) -> None:
        """Begin to move the slice, at the latest with ``flush``."""

    def flush(self) -> None:  # noqa: B027 - nor does every transport post in chains
        """Begin to move the posted slices."""

    @property
    def num_posted(self) -> int:
        """Number of moving slices."""
        return len(self._posted)

    @property
    def writing(self) -> bool:
        """Whether a WRITE is among them."""
        return any(each.piece.opcode is Opcode.WRITE for each in self._posted)

    @abstractmethod
    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        """Append the slices whose bytes are in place, and the refused ones."""

    def fileno(self) -> int:
        """Return a descriptor, readable after ``arm`` when ``collect`` has something; -1 if it must be polled."""
        return -1

    def arm(self) -> None:  # noqa: B027 - without a descriptor there is nothing to do
        """Have the descriptor signal the next end of a slice."""

    def woken(self) -> None:  # noqa: B027 - the same
        """Record that the descriptor is readable."""

    @abstractmethod
    def close(self) -> None:
        """Let nothing land here and nothing be sent any more; forget posted slices. May wait a bounded time."""


class OneSidedConnection:
    """A mover on ``path``; it starts to connect at once."""

    def __init__(self, path: Path, mover: Mover, control: Control, fences: Fences) -> None:
        self.path = path
        self.watched = 0  # events of the control connection requested from the link's poller
        self.control = control
        self.mover = mover
        self._fences = fences
        self._pending: deque[Slice] = deque()
        self._to_compare: deque[Slice] = deque()  # already landed
        self._connecting = False
        control.connect(mover.connect_payload)

    # --- for the link

    @property
    def greeted(self) -> bool:
        """Whether both ends are up."""
        return self.mover.ready

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self.has_slices or self.control.busy

    @property
    def has_slices(self) -> bool:
        """Whether a slice is under way."""
        return bool(self._pending or self.mover.num_posted or self._to_compare or self.control.num_comparing)

    @property
    def needs_polling(self) -> bool:
        """Whether something is moving whose end no descriptor signals."""
        return self.mover.num_posted > 0 and self.mover.fileno() < 0

    def queue(self, piece: Slice) -> None:
        """Post the slice at the next ``advance``, or as soon after as possible."""
        self._pending.append(piece)

    def advance(self, ended: list[Completion]) -> None:
        """Take landed slices, post pending ones; append what ended."""
        try:
            self._reach()
            if self.mover.num_posted:
                self._collect(ended)
            for each in self.control.take_digested():
                ended.append(self._compared(each))
            if self._pending and self.mover.ready and self.control.clears(self._pending):
                self._post(ended)
        except TanghuluError as error:
            raise ConnectionBroken(type(error)(f"{self.path.label}: {error.message}")) from error
        except MalformedMessage as error:
            raise ConnectionBroken(typed_error(error, self.path.label)) from error

    def arm(self) -> None:
        """Have the mover's descriptor signal the next end."""
        if self.mover.num_posted:
            self.mover.arm()

    def shut(self) -> None:
        """Close both ends: afterwards nothing lands here, and no WRITE of it lands at the owner.

        Waits for the owner's confirmation for CLOSE_WAIT_S at most, and only if a WRITE was under way; if it does not
        arrive, the token becomes a fence, for which every later slice to that owner waits.
        """
        writing = self.mover.writing
        self._pending.clear()
        self._to_compare.clear()
        self.mover.close()
        if writing and not self.control.receive_closed():
            self._fences.add(self.control.token)
        self.control.close()

    def check(self) -> None:
        """Assert the invariants: nothing moves before both ends are up, and expected answers are counted."""
        assert self.mover.ready or not (self.mover.num_posted or self._to_compare)
        self.control.check()

    # --- inside

    def _reach(self) -> None:
        """Continue connecting, once the owner has granted it."""
        if self.mover.ready:
            return
        if not self._connecting and self.control.granted is not None:
            self._connecting = True
            self.mover.connect(self.control.granted)
        self.mover.advance()

    def _post(self, ended: list[Completion]) -> None:
        pending, mover, refusals = self._pending, self.mover, self.control.refusals
        while pending and mover.has_room_for(pending[0]):
            piece = pending[0]
            refusal = refusals.get(piece.lease_id)
            if refusal is not None:
                ended.append(Refused(piece.slice_id, refusal))
            else:
                mover.post(piece)
            pending.popleft()
        mover.flush()

    def _collect(self, ended: list[Completion]) -> None:
        landed: list[Slice] = []
        try:
            self.mover.collect(landed, ended)
        finally:
            ended += [Arrived(piece.slice_id) for piece in landed if not piece.verified]
            self._to_compare += [piece for piece in landed if piece.verified]
        while self._to_compare:
            self.control.request_digest(self._to_compare[0])
            self._to_compare.popleft()

    def _compared(self, found: Digested) -> Completion:
        """Return whether both sides hold the same bytes for a landed verified slice."""
        piece = found.piece
        if found.refusal is not None:
            return Refused(piece.slice_id, found.refusal)
        here = digest_of(piece.memory())
        if here == found.digest:
            return Arrived(piece.slice_id)
        text = f"{piece.length} bytes have checksum {here:#x} here, {found.digest:#x} at the owner"
        return Corrupt(piece.slice_id, ChecksumMismatch(f"{self.path.label}: {text}"))
