"""The write buffers of one client: ranges of nodes' memory that it fills with values and records. Pure.

A node gives one to a client of its host that puts often; the layout and its guarantees are those of
``store.protocol.write_buffer``. This is the client's side: the open buffers, and when to request another.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.store.client.logic.effects import NodeLink, PeerId
from tanghulu.store.protocol.shared_index import IndexReader
from tanghulu.store.protocol.write_buffer import BufferPlace, BufferWriter

#: A write buffer is requested when two puts come within that time.
OFTEN_S = 1.0
#: A node that had none to give is not asked again within this time, except for smaller values.
REFUSED_S = 0.1
#: Part of a new write buffer that is mapped at once, for the first small values.
TOUCHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class MappedNode:
    """A node of this host with mapped memory and its shared index; ``generation`` identifies the node's run."""

    link: NodeLink
    index: IndexReader
    generation: int


class OpenWriteBuffers:
    """The open write buffers by node. Safe from any thread: every step is one operation of a dict."""

    def __init__(self) -> None:
        self._open: dict[PeerId, BufferWriter] = {}
        self._last_s: dict[PeerId, float] = {}
        self._refused: dict[PeerId, tuple[float, int]] = {}  # until when, for values of at least this many bytes

    def reserve(self, node: PeerId, size_bytes: int) -> tuple[BufferWriter, int] | None:
        """Reserve room for a value of that size in the open write buffer at ``node``; None if there is none."""
        buffer = self._open.get(node)
        place = None if buffer is None else buffer.begin(size_bytes)
        return None if buffer is None or place is None else (buffer, place)

    def may_request(self, node: PeerId, size_bytes: int, now_s: float, *, often: bool) -> bool:
        """Return whether to request a write buffer from ``node`` for values of that size now; counts as requested.

        ``often``: this put alone has several values. A write buffer whose node only lags in reading its records is not
        replaced: a call makes the node read them. A closed one is left at once, a full one when it is replaced.
        """
        buffer = self._open.get(node)
        if buffer is not None:
            if buffer.closed:
                self._leave(node, buffer)
            elif buffer.fits(size_bytes):
                return False
        last_s, self._last_s[node] = self._last_s.get(node, float("-inf")), now_s
        until_s, least_bytes = self._refused.get(node, (0.0, 0))
        if (now_s - last_s > OFTEN_S and not often) or (now_s < until_s and size_bytes >= least_bytes):
            return False
        self._refused[node] = now_s + REFUSED_S, 0  # no other thread asks meanwhile
        return True

    def refused(self, node: PeerId, size_bytes: int, now_s: float) -> None:
        """Record that the node has none for values of that size."""
        self._refused[node] = now_s + REFUSED_S, size_bytes

    def opened(self, node: PeerId, link: NodeLink, place: BufferPlace) -> None:
        """Take the node's new write buffer, unless it lies outside writable memory."""
        view = link.remote.map_writable()
        if view is None or place.end > len(view):
            return
        link.remote.touch(place.offset, min(place.length, TOUCHED_BYTES))
        before, self._open[node] = self._open.get(node), BufferWriter(view, place)
        self._refused.pop(node, None)
        if before is not None:
            before.leave()

    def forget(self, node: PeerId) -> None:
        """Forget the node: its memory is no longer mapped, or another process took its place."""
        buffer = self._open.pop(node, None)
        if buffer is not None:
            buffer.leave()

    def close(self) -> None:
        """Leave all write buffers, as the client is closed."""
        for node in list(self._open):
            self.forget(node)

    def _leave(self, node: PeerId, buffer: BufferWriter) -> None:
        if self._open.get(node) is buffer:
            self._open.pop(node, None)
        buffer.leave()
