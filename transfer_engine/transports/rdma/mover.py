"""Client's end of rdma: a queue pair, the slices posted on it, and the staged ones.

Owns the pair and the order of posting. Nothing here waits, but ``close`` for a bounded time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tanghulu.errors import InvalidRequest, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Completion, Refused
from tanghulu.transfer_engine.transports.onesided.connection import Mover, Posted
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices, StagingMemory
from tanghulu.transfer_engine.transports.rdma.verbs import QueuePair, WorkCompletion, WorkRequest, choose_signalled
from tanghulu.transfer_engine.transports.rdma.wire import QueuePairAddress, SegmentKey, pack_connect, parse_granted

#: Capacity of a queue pair, in works; the engine's windows are smaller.
MAX_WORKS = 256
#: Most seconds for which closing waits for posted works to end.
FLUSH_WAIT_S = 0.2


class SetUp:
    """Connect a queue pair in a thread of its own: the kernel may take a second to resolve the peer's address.

    Owns the pair's end if it is abandoned before it is connected. Begins at once; ``wake`` is called when it is done,
    unless it was abandoned before.
    """

    def __init__(
        self, pair: QueuePair, peer: QueuePairAddress, devices: LocalDevices, wake: Callable[[], None]
    ) -> None:
        self.done = False
        #: Reason of the failure; only when it is done.
        self.error: TanghuluError | None = None
        self._pair, self._peer, self._devices, self._wake = pair, peer, devices, wake
        self._lock = threading.Lock()
        self._abandoned = False
        devices.use()
        threading.Thread(target=self._run, name="tanghulu-rdma-set-up", daemon=True).start()

    def abandon(self) -> None:
        """Close the pair: now if its thread has ended, else when it ends. Nothing was ever posted on it."""
        with self._lock:
            self._abandoned = True
            if self.done:
                self._pair.close()

    def _run(self) -> None:
        try:
            self._pair.connect(self._peer)
        except TanghuluError as error:
            self.error = error
        with self._lock:
            self.done = True
            if self._abandoned:
                self._pair.close()
            else:
                self._wake()
        self._devices.let_go()


class RdmaMover(Mover):
    """A queue pair of ``local_device``, to be connected to one of the owner's ``far_device``."""

    def __init__(
        self,
        devices: LocalDevices,
        local_device: str,
        far_device: str,
        staging: StagingMemory,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called from a thread when ``advance`` has work that no descriptor signals.

        Raises NodeUnavailable or TransferFailed if there is no queue pair.
        """
        self._pair = devices.device(local_device).queue_pair(MAX_WORKS)
        super().__init__(staging.slots, pack_connect(far_device, self._pair.address))
        self._devices, self._local_device, self._staging, self._wake = devices, local_device, staging, wake
        self._set_up: SetUp | None = None
        self._segment = SegmentKey(0, 0)
        self._chain: list[WorkRequest] = []

    # --- Mover

    def connect(self, granted: bytes) -> None:
        """Connect to the owner's queue pair, in a thread."""
        address, self._segment = parse_granted(granted)
        self._set_up = SetUp(self._pair, address, self._devices, self._wake)

    def advance(self) -> None:
        """Take the outcome of the connecting thread, once available."""
        if self._set_up is None or not self._set_up.done:
            return
        if self._set_up.error is not None:
            raise self._set_up.error
        self._set_up = None
        self.ready = True

    def has_room_for(self, piece: Slice) -> bool:
        """Return whether the queue pair has a place for it, and so has the staging memory, if required."""
        return len(self._posted) < MAX_WORKS and super().has_room_for(piece)

    def post(self, piece: Slice) -> None:
        """Add the slice to the chain that ``flush`` hands to the device."""
        slot = self._slots.take(piece)
        if slot is None:
            address = piece.buffer.address + piece.local_offset
            key = self._devices.region(self._local_device, piece.buffer).local_key
        else:
            address, key = self._slots.address(slot), self._staging.key
        self._posted.append(Posted(piece, slot))
        remote = self._segment.address + piece.remote_offset
        self._chain.append(
            WorkRequest(piece.slice_id, piece.opcode, address, key, remote, self._segment.key, piece.length)
        )

    def flush(self) -> None:
        """Hand the chain to the device."""
        works, self._chain = self._chain, []
        if works:
            self._pair.post(works, choose_signalled([work.length for work in works]))

    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        """Take completions: one also signals the end of all posted before it."""
        for completed in self._pair.poll():
            if completed.fault:
                self._failed(completed, ended)
            while self._posted:
                piece, slot, _ = self._posted.popleft()
                if slot is not None:
                    self._slots.put(slot, piece)
                landed.append(piece)
                if piece.slice_id == completed.work_id:
                    break

    def fileno(self) -> int:
        """Return the completion channel's descriptor."""
        return self._pair.fileno()

    def arm(self) -> None:
        """Have the channel signal the next completion."""
        self._pair.arm()

    def woken(self) -> None:
        """Take the channel's event."""
        self._pair.woken()

    def close(self) -> None:
        """Destroy the queue pair; one that is being connected is destroyed by its thread."""
        if self._posted:
            self._pair.flush(self._posted[-1].piece.slice_id, FLUSH_WAIT_S)
        if self._set_up is None:
            self._pair.close()
        else:
            self._set_up.abandon()
        for each in self._posted:
            if each.slot is not None:
                self._slots.put(each.slot)
        self._posted.clear()

    # --- inside

    def _failed(self, completed: WorkCompletion, ended: list[Completion]) -> None:
        """Handle a failed operation, with which the queue pair failed. A fault of the request is not retried."""
        guilty = next((each for each in self._posted if each.piece.slice_id == completed.work_id), None)
        if completed.access and guilty is not None:
            self._posted.remove(guilty)
            if guilty.slot is not None:
                self._slots.put(guilty.slot)
            error = InvalidRequest(f"{completed.fault}: the range is outside the segment")
            ended.append(Refused(guilty.piece.slice_id, error))
        raise NodeUnavailable(completed.fault) if "RETRY" in completed.fault else TransferFailed(completed.fault)
