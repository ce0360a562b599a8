"""One mover of the client's and its control connection: they are set up, posted to, polled and given up together.

Owns the order of what happens to a slice: it waits until the owner's end is reached, fences are told and its lease was
asked for; it is posted; it lands; and where it is verified the owner is asked what its range holds, and both sides are
compared. How an end moves bytes is its ``Mover``'s affair. Raises ConnectionBroken when the two cannot be used any
more; who uses them then, and what is tried instead, is decided elsewhere.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from tanghulu.errors import ChecksumMismatch, TanghuluError
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Arrived, Completion, ConnectionBroken, Corrupt, Fences, Refused
from tanghulu.transfer_engine.core.wire import MalformedMessage, digest_of, typed_error
from tanghulu.transfer_engine.transports.onesided.control import Control, Digested


class Mover(Protocol):
    """The client's end of a one-sided transport: a queue pair, an agent. Used by one thread at a time.

    Raises NodeUnavailable or TransferFailed when it cannot be used any more.
    """

    #: What the owner has to be told in order to make its end.
    asked: bytes
    #: Whether slices may be posted.
    ready: bool

    def connect(self, granted: bytes) -> None:
        """Reach the owner's end; ``ready`` once that is done. Raises MalformedMessage, too."""
        ...

    def advance(self) -> None:
        """Go on with connecting."""
        ...

    def has_room_for(self, piece: Slice) -> bool:
        """Return whether the slice can be posted now."""
        ...

    def post(self, piece: Slice) -> None:
        """Begin to move the slice, at the latest with ``flush``."""
        ...

    def flush(self) -> None:
        """Begin to move what was posted."""
        ...

    @property
    def num_posted(self) -> int:
        """Slices that are moving."""
        ...

    @property
    def writing(self) -> bool:
        """Whether a WRITE is among them."""
        ...

    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        """Append the slices whose bytes are where they belong, and what was refused."""
        ...

    def fileno(self) -> int:
        """Readable when ``collect`` has something after ``arm``; -1 where it must be asked again and again."""
        ...

    def arm(self) -> None:
        """Have the descriptor tell the next end of a slice."""
        ...

    def woken(self) -> None:
        """The descriptor is readable."""
        ...

    def close(self) -> None:
        """Let nothing land here and nothing be sent any more; forget what was posted. May wait a bounded time."""
        ...


class OneSidedConnection:
    """A mover on ``path``; it starts to connect at once."""

    def __init__(self, path: Path, mover: Mover, control: Control, fences: Fences) -> None:
        self.path = path
        self.watched = 0  # the events of the control connection that the link's poller was told to look for
        self.control = control
        self.mover = mover
        self._fences = fences
        self._pending: deque[Slice] = deque()
        self._to_compare: deque[Slice] = deque()  # they have landed
        self._connecting = False
        control.connect(mover.asked)

    # --- what the link asks

    @property
    def greeted(self) -> bool:
        """Whether both ends stand."""
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
    def must_be_asked(self) -> bool:
        """Whether something is moving and no descriptor tells its end."""
        return self.mover.num_posted > 0 and self.mover.fileno() < 0

    def queue(self, piece: Slice) -> None:
        """Post the slice when ``advance`` is called next, or as soon after as it can be."""
        self._pending.append(piece)

    def advance(self, ended: list[Completion]) -> None:
        """Take what landed, post what is pending; append what ended."""
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
        """Have the mover's descriptor tell what ends next."""
        if self.mover.num_posted:
            self.mover.arm()

    def shut(self) -> None:
        """Close both ends: afterwards nothing lands here, and no WRITE of it lands at the owner.

        The owner's word for that is waited for CLOSE_WAIT_S at most, and only if a WRITE was under way; where it does
        not come, the token becomes a fence, which every later slice to that owner waits for.
        """
        writing = self.mover.writing
        self._pending.clear()
        self._to_compare.clear()
        self.mover.close()
        if writing and not self.control.receive_closed():
            self._fences.add(self.control.token)
        self.control.close()

    def check(self) -> None:
        """Assert the invariants: nothing moves before both ends stand, and what is expected is counted."""
        assert self.mover.ready or not (self.mover.num_posted or self._to_compare)
        self.control.check()

    # --- inside

    def _reach(self) -> None:
        """Go on with connecting, once the owner has granted it."""
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
            self.control.ask_digest(self._to_compare[0])
            self._to_compare.popleft()

    def _compared(self, said: Digested) -> Completion:
        """Return whether both sides hold the same bytes where a verified slice has landed."""
        piece = said.piece
        if said.refusal is not None:
            return Refused(piece.slice_id, said.refusal)
        here = digest_of(piece.memory())
        if here == said.digest:
            return Arrived(piece.slice_id)
        text = f"{piece.length} bytes have checksum {here:#x} here, {said.digest:#x} at the owner"
        return Corrupt(piece.slice_id, ChecksumMismatch(f"{self.path.label}: {text}"))
