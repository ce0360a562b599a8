"""Streamed values: puts whose payload is received where it will lie, with the putter's last word behind it. Pure.

A stream is a reservation that is filled over the socket. The range is reserved when the head of a stream has come, and
the node itself receives into it, so nobody else ever touches it: when the connection ends, or is ended because the last
word did not come in time, the range is free.

Example: STREAM of k, 1 MiB, at 10.0 s: reserved. At 10.0003 all bytes are there: landed. At 10.0004 SETTLE says
COMMITTED, with the checksum: k is LIVE, and the master, which knows it already, hears of it with the next message.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Reserved
from tanghulu.store.protocol.messages import EndStreamRequest
from tanghulu.store.protocol.types import NewChunk, StreamEnd

#: Of the node's memory, what all incoming puts may take; beyond it values are put in another way.
MAX_FRACTION = 1 / 8


@dataclass(eq=False, slots=True)
class IncomingPut:
    """One streamed value. ``visible``: its putter waits until the master knows it. ``landed``: all bytes are there."""

    chunk: Chunk
    visible: bool
    until_s: float
    landed: bool = False

    @property
    def ended(self) -> bool:
        """Whether the range is a chunk's, or free."""
        return self.chunk.state is not ChunkState.RESERVED

    def land(self) -> None:
        """The last byte came."""
        assert not self.landed, f"{self.chunk!r} has landed already"
        assert not self.ended, f"{self.chunk!r} does not come any more"
        self.landed = True


class Settled(NamedTuple):
    """What a streamed value has become; ``written`` None: it was dropped, on its putter's order.

    ``told``: nobody waits for the master any more.
    """

    incoming: IncomingPut
    written: Reserved | Existed | TanghuluError | None
    told: bool


class IncomingPuts:
    """All of a node, by owner (a connection) and stream."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._by_owner: dict[Hashable, dict[int, IncomingPut]] = {}
        self._bytes = 0

    def begin(
        self, owner: Hashable, stream_id: int, new: NewChunk, visible: bool, until_s: float
    ) -> IncomingPut | None:
        """A range for a value that is coming; None if it exists, or if there is no room without waiting.

        Raises as NodeState.reserve.
        """
        if self._state.current_anywhere(new.key) is not None or stream_id in self._by_owner.get(owner, ()):
            return None
        if self._bytes + new.size_bytes > self._state.capacity_bytes * MAX_FRACTION:
            return None
        reserved = self._state.reserve_at_once(new, None)
        if not isinstance(reserved, Reserved):
            return None
        incoming = IncomingPut(reserved.chunk, visible, until_s)
        self._by_owner.setdefault(owner, {})[stream_id] = incoming
        self._bytes += new.size_bytes
        return incoming

    def knows(self, owner: Hashable) -> bool:
        """Whether ``owner`` has begun something, ever."""
        return owner in self._by_owner

    def settle(self, owner: Hashable, said: EndStreamRequest) -> Settled | None:
        """The last word on a value that has landed. None: ``owner`` has no such stream; it was refused, and answered.

        A chunk that its client has committed for another generation of this node, or too long ago, is reported like any
        other.
        """
        incoming = self._by_owner.get(owner, {}).pop(said.stream_id, None)
        if incoming is None:
            return None
        assert incoming.landed, f"the last word on {incoming.chunk!r} came before its last byte"
        chunk, state = incoming.chunk, self._state
        self._bytes -= chunk.size_bytes
        if said.word is StreamEnd.DROP or not said.checksums.parts:
            state.abort_reservation(chunk)
            error = InvalidRequest(f"{chunk.key!r} came without a checksum; SETTLE says it")
            return Settled(incoming, None if said.word is StreamEnd.DROP else error, told=True)
        told = said.word is StreamEnd.COMMITTED and state.is_commit_valid(chunk, said.generation)
        by = CommittedBy.CLIENT if told else CommittedBy.node(visible=incoming.visible)
        try:
            return Settled(incoming, state.commit(chunk, said.checksums, by), told)
        except TanghuluError as failure:
            return Settled(incoming, failure, told)

    def gone(self, owner: Hashable) -> None:
        """The connection has ended: nothing more comes."""
        for incoming in self._by_owner.pop(owner, {}).values():
            self._bytes -= incoming.chunk.size_bytes
            self._state.abort_reservation(incoming.chunk)

    def overdue(self, now_s: float) -> list[Hashable]:
        """Owners whose time is up; to be hung up on."""
        return [
            owner
            for owner, incoming in self._by_owner.items()
            if any(each.until_s <= now_s for each in incoming.values())
        ]

    def check(self) -> None:
        """Assert that bytes are counted, and that each incoming put has a reservation of its own."""
        incoming = [each for own in self._by_owner.values() for each in own.values()]
        assert self._bytes == sum(each.chunk.size_bytes for each in incoming)
        assert self._bytes <= self._state.capacity_bytes * MAX_FRACTION
        for each in incoming:
            assert not each.ended, f"{each.chunk!r} is still coming"

    def __repr__(self) -> str:
        return f"IncomingPuts({sum(map(len, self._by_owner.values()))}, {self._bytes} B)"
