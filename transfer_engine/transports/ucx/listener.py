"""The owner's ends of ucx: an agent of its own for each client, with the segment registered.

UCX moves the bytes in the agents' threads; ``onesided.listener`` decides who gets an agent, and when it must go.
Closing one takes some milliseconds on the event loop; making one takes longer and is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.core.wire import MalformedMessage
from tanghulu.transfer_engine.transports.onesided.listener import Grant
from tanghulu.transfer_engine.transports.ucx.agent import UCX, Agent, pack_granted, probe

#: Agents at once; each has a thread, some 15 descriptors and 5 MB.
MAX_AGENTS = 64


class UcxEnds:
    """Makes the agents of ``segment``; UCX finds the devices by itself."""

    dialect = UCX
    devices: Sequence[str] = ("",)

    def __init__(self, segment: MemorySegment) -> None:
        self.max_ends = MAX_AGENTS
        self._segment = segment
        self._memory: Buffer | None = None

    async def start(self) -> None:
        """Raises NodeUnavailable without NIXL."""
        reason = await asyncio.to_thread(probe)
        if reason:
            raise NodeUnavailable(reason)
        self._memory = Buffer(self._segment.view)

    def admit(self, asked: bytes) -> None:
        """Anybody can have an agent; raises MalformedMessage."""
        if asked:
            raise MalformedMessage(f"a ucx CONNECT with {len(asked)} bytes")

    async def make(self, token: int, asked: bytes, take: Callable[[Grant], None]) -> None:
        """Hand ``take`` an agent. Raises NodeUnavailable, TransferFailed."""
        take(await asyncio.to_thread(self._make, token))

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None

    def _make(self, token: int) -> Grant:
        memory = self._memory
        if memory is None:
            raise NodeUnavailable("the segment's server is closing")
        agent = Agent(f"owner-{token:x}", serves=True)
        try:
            return Grant(agent, pack_granted(memory.address, agent.offer(memory.address, memory.size_bytes)))
        except TanghuluError:
            agent.close()
            raise
