"""Values on their way to their final memory: the payload of a large PUT is received in place. Pure.

The node itself receives the value, so nobody else ever touches the range, and it has no lease: when the connection
ends, or is cut because the value takes too long, the range is free. A connection carries one frame after the other, so
at most one value arrives on it at a time.

Example: the head of a PUT of k, 1 MiB, arrives: a range is reserved, and the socket is read into it. With the last byte
k is committed as if it had been copied there.
"""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.rpc.fast_server import Peer
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import Reserved
from tanghulu.store.protocol.types import NewChunk

#: Share of the node's memory that may be arriving at one time; values beyond it are received elsewhere and copied.
MAX_FRACTION = 1 / 8
#: Age of a reservation at which its value's connection is cut.
MAX_INCOMING_S = 10.0


class IncomingValues:
    """Values of all connections. ``on_freed`` is called when the range of an ended connection may be free."""

    def __init__(self, state: NodeState, on_freed: Callable[[], None]) -> None:
        self._state, self._chunks = state, state.chunks
        self._on_freed = on_freed
        self._by_peer: dict[Peer, Chunk | None] = {}
        self._num_bytes = 0

    def begin(self, peer: Peer, new: NewChunk) -> Chunk | None:
        """Reserve a range for an incoming value; None if the key exists, or there is none without waiting.

        Raises the typed error of a value that the node does not accept.
        """
        if self._num_bytes + new.size_bytes > self._chunks.capacity_bytes * MAX_FRACTION:
            return None
        reserved = self._state.reserve(new, None)
        if not isinstance(reserved, Reserved):
            return None
        if peer not in self._by_peer:
            peer.on_close.append(lambda: self._gone(peer))
        self._by_peer[peer] = reserved.chunk
        self._num_bytes += new.size_bytes
        return reserved.chunk

    def end(self, peer: Peer) -> Chunk:
        """Return the reservation of the value of ``peer``, which has arrived; it is now the caller's to commit."""
        chunk, self._by_peer[peer] = self._by_peer[peer], None
        assert chunk is not None, f"nothing is arriving from {peer.name}"
        self._num_bytes -= chunk.size_bytes
        return chunk

    def _gone(self, peer: Peer) -> None:
        """Drop the value of an ended connection."""
        if self._by_peer[peer] is not None:
            self._chunks.abort_reservation(self.end(peer))
        del self._by_peer[peer]
        self._on_freed()

    def tick(self) -> None:
        """Disconnect peers whose value takes too long."""
        for peer, chunk in list(self._by_peer.items()):
            if chunk is not None and self._chunks.age_s(chunk) >= MAX_INCOMING_S:
                peer.hang_up()

    def check(self) -> None:
        """Assert that bytes are counted, and that each arriving value has a reservation of its own."""
        arriving = [chunk for chunk in self._by_peer.values() if chunk is not None]
        assert self._num_bytes == sum(chunk.size_bytes for chunk in arriving)
        assert self._num_bytes <= self._chunks.capacity_bytes * MAX_FRACTION
        for chunk in arriving:
            assert chunk.state is ChunkState.RESERVED, f"{chunk!r} was not committed yet"

    def __repr__(self) -> str:
        return f"IncomingValues({self._num_bytes} B)"
