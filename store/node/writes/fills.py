"""Reservations that are filled over the socket on which they were asked for: RESERVE with its value behind it. Pure.

The node itself receives the value, where it will lie, so nobody else ever touches the range and it has no lease: when
the connection ends, or is cut because COMMIT did not come in time, the range is free. COMMIT names the reservation by
the number that the client gave it on this connection. RESERVE is not answered: what was wrong with it COMMIT says.

Example: RESERVE of k, 1 MiB, as number 7: a range is reserved. When all bytes are there COMMIT of number 7 says the
checksum, and that the master has accepted k: k is LIVE, and the master hears of it with the next report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tanghulu.errors import InvalidRequest, LeaseExpired, Overloaded, TanghuluError
from tanghulu.rpc.fast_server import Peer
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import Existed, Reserved
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import format_size

#: Of the node's memory, what may be arriving at one time; beyond it values are put in another way.
MAX_FRACTION = 1 / 8
#: Of one connection, what it has neither committed nor aborted.
MAX_FILLS = 256
#: COMMIT comes so soon after RESERVE, or the connection is cut.
MAX_FILL_S = 10.0


@dataclass(eq=False, slots=True)
class Fill:
    """A reservation with its value behind it. ``coming``: bytes are still to come."""

    chunk: Chunk
    coming: bool = True


#: The outcome of a RESERVE with its value behind it.
Begun: TypeAlias = Fill | Existed | TanghuluError


class Fills:
    """The reservations of all connections. ``on_freed`` is called when ranges of an ended connection may be free."""

    def __init__(self, state: NodeState, on_freed: Callable[[], None]) -> None:
        self._state, self._chunks = state, state.chunks
        self._on_freed = on_freed
        self._by_peer: dict[Peer, dict[int, Begun]] = {}
        self._bytes = 0  # that are coming

    def begin(self, peer: Peer, number: int, new: NewChunk) -> Begun:
        """A range for a value that is coming; or that the key exists, or why there is none without waiting.

        Raises InvalidRequest for a number that is taken, Overloaded for too many of them.
        """
        own = self._by_peer.get(peer, {})
        if number in own:
            raise InvalidRequest(f"number {number} is in use on this connection; COMMIT ends it")
        if len(own) >= MAX_FILLS:
            raise Overloaded(f"{MAX_FILLS} reservations of this connection are neither committed nor aborted")
        try:
            begun = self._reserve(new)
        except TanghuluError as error:
            return error
        if isinstance(begun, Fill):
            self._bytes += new.size_bytes
            self.keep(peer, number, begun)
        return begun

    def _reserve(self, new: NewChunk) -> Begun:
        chunks, reserved = self._chunks, None
        if self._bytes + new.size_bytes <= chunks.capacity_bytes * MAX_FRACTION or chunks.current_anywhere(new.key):
            reserved = self._state.reserve_at_once(new, None)
        if isinstance(reserved, Reserved):
            return Fill(reserved.chunk)
        size = format_size(new.size_bytes)
        refusal = f"this node has no room for {size} without waiting; put {new.key!r} by PUT, which waits"
        return reserved or Overloaded(refusal)

    def keep(self, peer: Peer, number: int, begun: Begun) -> None:
        """COMMIT will ask what became of ``number``."""
        own = self._by_peer.get(peer)
        if own is None:
            own = self._by_peer[peer] = {}
            peer.on_close.append(lambda: self._gone(peer))
        own[number] = begun

    def filled(self, fill: Fill) -> None:
        """The last byte came."""
        assert fill.coming, f"{fill.chunk!r} is there already"
        fill.coming = False
        self._bytes -= fill.chunk.size_bytes

    def take(self, peer: Peer, number: int) -> Chunk | Existed | TanghuluError:
        """The reservation that ``peer`` has filled as ``number``, now the caller's to end; or why there is none."""
        begun = self._by_peer.get(peer, {}).pop(number, None)
        if begun is None:
            return LeaseExpired(f"nothing was reserved as number {number} on this connection")
        if not isinstance(begun, Fill):
            return begun
        assert not begun.coming, f"COMMIT of {begun.chunk!r} came before its last byte"
        return begun.chunk

    def _gone(self, peer: Peer) -> None:
        """The connection has ended: nothing more comes."""
        for fill in self._by_peer.pop(peer).values():
            if isinstance(fill, Fill):
                if fill.coming:
                    self.filled(fill)
                self._chunks.abort_reservation(fill.chunk)
        self._on_freed()

    def tick(self) -> None:
        """Hang up on those who have begun a put and do not end it."""
        for peer, own in list(self._by_peer.items()):
            if any(isinstance(each, Fill) and self._chunks.age_s(each.chunk) >= MAX_FILL_S for each in own.values()):
                peer.hang_up()

    def check(self) -> None:
        """Assert that bytes are counted, and that what is coming has a reservation of its own."""
        fills = [each for own in self._by_peer.values() for each in own.values() if isinstance(each, Fill)]
        assert self._bytes == sum(fill.chunk.size_bytes for fill in fills if fill.coming)
        assert self._bytes <= self._chunks.capacity_bytes * MAX_FRACTION
        for fill in fills:
            assert fill.chunk.state is ChunkState.RESERVED, f"{fill.chunk!r} was not committed yet"

    def __repr__(self) -> str:
        return f"Fills({sum(map(len, self._by_peer.values()))}, {self._bytes} B coming)"
