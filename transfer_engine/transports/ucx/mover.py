"""Client's end of ucx: an agent, its transfers, and the staged slices.

Owns all three. Making and closing an agent takes some milliseconds; nothing else here waits.
"""

from __future__ import annotations

from collections import deque

from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.staged_slots import StagedSlots
from tanghulu.transfer_engine.core.transport import Completion
from tanghulu.transfer_engine.transports.onesided.connection import Mover, Posted
from tanghulu.transfer_engine.transports.ucx.agent import Agent, AgentRegistration, parse_granted

NUM_SLOTS = 16


class UcxMover(Mover):
    """An agent of one connection alone; ``token`` is its name, and the key of what it registers."""

    def __init__(self, token: int) -> None:
        """Make the agent; raises NodeUnavailable if there is no NIXL, TransferFailed."""
        super().__init__(StagedSlots(NUM_SLOTS))
        self._token = token
        self._peer = ""
        self._segment_address = 0
        self._agent = Agent(f"client-{token:x}", serves=False)
        self._staged = self._agent.register(self._slots.memory.address, self._slots.memory.size_bytes)

    # --- Mover

    def connect(self, granted: bytes) -> None:
        """Load the owner's metadata."""
        self._segment_address, metadata = parse_granted(granted)
        self._peer = self._agent.connect(metadata)
        self.ready = True

    def post(self, piece: Slice) -> None:
        """Hand the slice to UCX."""
        slot = self._slots.take(piece)
        if slot is None:
            self._register(piece.buffer)
            local = piece.buffer.address + piece.local_offset
        else:
            local = self._slots.address(slot)
        remote = self._segment_address + piece.remote_offset
        transfer = self._agent.post(piece.opcode, self._peer, local, remote, piece.length)
        self._posted.append(Posted(piece, slot, transfer))

    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        """Advance the transfers by polling each."""
        still: deque[Posted] = deque()
        for each in self._posted:
            if not each.transfer.done():
                still.append(each)
                continue
            each.transfer.release()
            if each.slot is not None:
                self._slots.put(each.slot, each.piece)
            landed.append(each.piece)
        self._posted = still

    def close(self) -> None:
        """Close the agent; slots in use go with it."""
        self._posted.clear()
        self._agent.close()
        self._staged.close()

    # --- inside

    def _register(self, buffer: Buffer) -> None:
        """Register once for each buffer and agent; closed agents' registrations are forgotten with the next."""
        if self._token in buffer.regions:
            return
        for key, region in list(buffer.regions.items()):
            if isinstance(region, AgentRegistration) and (region.agent is None or region.agent.closed):
                buffer.regions.pop(key, None)
        buffer.regions[self._token] = self._agent.register(buffer.address, buffer.size_bytes)
