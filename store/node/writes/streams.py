"""Streamed values: received where they will lie, with their putter's last word behind them. Pure; bytes are the edge's.

    COMING ----LANDED----> HERE ----SETTLED----> ENDED
       |                     |                     ^
       +--------LOST---------+--------LOST---------+

The range is reserved when the head of a stream has come, and the node itself receives into it, so nobody else ever
touches it: when the connection ends, or is ended because the last word did not come in time, the range is free.

Example: STREAM of k, 1 MiB, at 10.0 s: COMING. At 10.0003 all bytes are there: HERE. At 10.0004 SETTLE says PROCLAIMED,
with the checksum: k is LIVE, and the master, which knows it already, hears of it with the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import Existed, Reserved
from tanghulu.store.node.state.proclaimed import commit_proclaimed, is_relied_on
from tanghulu.store.protocol.messages import SettleRequest
from tanghulu.store.protocol.types import LastWord, NewChunk

#: Of the node's memory, what all arrivals may take; beyond it values are put in another way.
MAX_FRACTION = 1 / 8


class ArrivalState(Enum):
    """Where a streamed value stands."""

    #: Its bytes are being received.
    COMING = "coming"
    #: All bytes are there; its putter's last word is not.
    HERE = "here"
    #: The range is a chunk's, or free.
    ENDED = "ended"

    __hash__ = object.__hash__  # see Pin


class ArrivalEvent(Enum):
    """What happens to it."""

    LANDED = "the last byte came"
    SETTLED = "the last word came"
    LOST = "its connection ended"

    __hash__ = object.__hash__


_S, _E = ArrivalState, ArrivalEvent
TRANSITIONS: dict[tuple[ArrivalState, ArrivalEvent], ArrivalState] = {
    (_S.COMING, _E.LANDED): _S.HERE,
    (_S.COMING, _E.LOST): _S.ENDED,
    (_S.HERE, _E.SETTLED): _S.ENDED,
    (_S.HERE, _E.LOST): _S.ENDED,
}


@dataclass(eq=False, slots=True)
class Arrival:
    """One streamed value. ``visible``: its putter waits until the master knows it."""

    chunk: Chunk
    visible: bool
    until_s: float
    state: ArrivalState = ArrivalState.COMING

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state is ArrivalState.ENDED

    def step(self, event: ArrivalEvent) -> None:
        """Apply ``event``; asserts that the table knows the pair."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"an arrival cannot take {event.value!r} in {self.state.value}"
        self.state = following


class Settled(NamedTuple):
    """What a streamed value has become; ``written`` None: it was dropped, by its putter's wish.

    ``told``: nobody waits for the master any more.
    """

    arrival: Arrival
    written: Reserved | Existed | TanghuluError | None
    told: bool


class Arrivals:
    """All of a node, by owner (a connection) and stream. ``on_displaced`` hears of chunks that gave way."""

    def __init__(self, state: NodeState, generation: int, on_displaced: Callable[[Holding], None]) -> None:
        self._state = state
        self._generation = generation
        self._on_displaced = on_displaced
        self._by_owner: dict[Hashable, dict[int, Arrival]] = {}
        self._bytes = 0

    def begin(self, owner: Hashable, stream_id: int, new: NewChunk, visible: bool, until_s: float) -> Arrival | None:
        """A range for a value that is coming; None if it exists, or if there is no room without waiting.

        Raises as NodeState.reserve.
        """
        if self._state.standing_anywhere(new.key) is not None or stream_id in self._by_owner.get(owner, ()):
            return None
        if self._bytes + new.size_bytes > self._state.capacity_bytes * MAX_FRACTION:
            return None
        reserved = self._state.reserve_at_once(new, None)
        if not isinstance(reserved, Reserved):
            return None
        arrival = Arrival(reserved.chunk, visible, until_s)
        self._by_owner.setdefault(owner, {})[stream_id] = arrival
        self._bytes += new.size_bytes
        return arrival

    def knows(self, owner: Hashable) -> bool:
        """Whether ``owner`` has begun something, ever."""
        return owner in self._by_owner

    def settle(self, owner: Hashable, said: SettleRequest) -> Settled | None:
        """The last word on a value that is HERE. None: ``owner`` has no such stream; it was refused, and answered then.

        A chunk that was proclaimed in the name of another life of this node, or too long ago, is announced like any
        other.
        """
        arrival = self._by_owner.get(owner, {}).pop(said.stream_id, None)
        if arrival is None:
            return None
        arrival.step(ArrivalEvent.SETTLED)
        chunk, state = arrival.chunk, self._state
        self._bytes -= chunk.size_bytes
        if said.word is LastWord.DROP or not said.checksums.parts:
            state.abandon(chunk)
            error = InvalidRequest(f"{chunk.key!r} came without a checksum; SETTLE says it")
            return Settled(arrival, None if said.word is LastWord.DROP else error, told=True)
        told = said.word is LastWord.PROCLAIMED and said.generation == self._generation
        told = told and is_relied_on(state, chunk)
        try:
            if told:
                return Settled(arrival, commit_proclaimed(state, chunk, said.checksums, self._on_displaced), told)
            return Settled(arrival, state.commit_written(chunk, said.checksums, visible=arrival.visible), told)
        except TanghuluError as failure:
            return Settled(arrival, failure, told)

    def gone(self, owner: Hashable) -> None:
        """The connection has ended: nothing more comes."""
        for arrival in self._by_owner.pop(owner, {}).values():
            arrival.step(ArrivalEvent.LOST)
            self._bytes -= arrival.chunk.size_bytes
            self._state.abandon(arrival.chunk)

    def overdue(self, now_s: float) -> list[Hashable]:
        """Owners whose time is up; to be hung up on."""
        return [
            owner
            for owner, arrivals in self._by_owner.items()
            if any(arrival.until_s <= now_s for arrival in arrivals.values())
        ]

    def check(self) -> None:
        """Assert that bytes are counted, and that each arrival has a reservation of its own."""
        arrivals = [arrival for own in self._by_owner.values() for arrival in own.values()]
        assert self._bytes == sum(arrival.chunk.size_bytes for arrival in arrivals)
        assert self._bytes <= self._state.capacity_bytes * MAX_FRACTION
        for arrival in arrivals:
            assert not arrival.ended
            assert arrival.chunk.state is ChunkState.RESERVED, f"{arrival.chunk!r} is still arriving"

    def __repr__(self) -> str:
        return f"Arrivals({sum(map(len, self._by_owner.values()))}, {self._bytes} B)"
