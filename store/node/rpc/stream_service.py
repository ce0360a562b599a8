"""The node's fast lane for streamed values: STREAM, whose payload is received in place, and SETTLE. An edge."""

from __future__ import annotations

import asyncio

from tanghulu.errors import InvalidRequest, Overloaded
from tanghulu.rpc.fast_server import NO_ANSWER, Answer, FastService, Later, PayloadSink, Peer
from tanghulu.store.node.rpc.metrics import TrafficCounters
from tanghulu.store.node.rpc.service import session_of
from tanghulu.store.node.rpc.sessions import after_drain
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import Existed
from tanghulu.store.node.writes.puts import PutService, remaining_s
from tanghulu.store.node.writes.streams import IncomingPut, IncomingPuts
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import EndStreamRequest, PutReply, StreamRequest
from tanghulu.types import format_size

#: The putter's last word comes so soon at the latest, or less if it says so: as long as a reservation lasts.
MAX_INCOMING_S = 10.0


class StreamService:
    """Registers its handlers by ``serve``; ``tick`` ends what takes too long."""

    def __init__(self, state: NodeState, puts: PutService, traffic: TrafficCounters) -> None:
        self.incoming = IncomingPuts(state)
        self._state = state
        self._puts = puts
        self._traffic = traffic
        self._answers: dict[IncomingPut, Later] = {}

    def serve(self, service: FastService) -> None:
        """Answer the two methods."""
        service.register(methods.STREAM, after_drain(self._state, self.stream))
        service.register_sink(methods.STREAM, self.land)
        service.register(methods.END_STREAM, after_drain(self._state, self.settle))

    def land(self, peer: Peer, request: StreamRequest, payload_bytes: int) -> PayloadSink | None:
        """A place for a value whose head is there; None if there is none now, or no need of one."""
        session_of(peer)
        new = request.item
        if payload_bytes != new.size_bytes:
            raise InvalidRequest(f"the value of {new.key!r} has {new.size_bytes} bytes, {payload_bytes} come")
        self._state.drain_buffers()
        is_first = not self.incoming.knows(peer)
        until_s = asyncio.get_running_loop().time() + remaining_s(request.deadline_ms, MAX_INCOMING_S)
        incoming = self.incoming.begin(peer, request.stream_id, new, request.visible, until_s)
        if incoming is None:
            return None
        if is_first:
            peer.on_close.append(lambda: self._gone(peer))
        return PayloadSink(self._puts.bytes_of(incoming.chunk), lambda: self._landed(incoming))

    def _landed(self, incoming: IncomingPut) -> Later:
        incoming.land()
        self._traffic.bytes_written["stream"] += incoming.chunk.size_bytes
        later = self._answers[incoming] = Later()
        return later

    def stream(self, peer: Peer, request: StreamRequest, attachment: memoryview) -> Answer | Later:
        """A value that came in one piece with its head, or that there was no place for."""
        sink = self.land(peer, request, len(attachment))
        if sink is not None:
            sink.view[:] = attachment
            landed = sink.landed()
            assert isinstance(landed, Later)
            return landed
        if self._state.current_anywhere(request.item.key) is not None:
            outcome = self._state.reserve_at_once(request.item, None)
            if isinstance(outcome, Existed):
                return PutReply.of([True])
        size = format_size(request.item.size_bytes)
        raise Overloaded(
            f"this node has no room for {size} without waiting; put {request.item.key!r} by PUT, which waits"
        )

    def settle(self, peer: Peer, said: EndStreamRequest, attachment: memoryview) -> Later:
        """The putter's last word; STREAM is answered now, or when the master knows the key."""
        session_of(peer)
        settled = self.incoming.settle(peer, said)
        if settled is None:
            return NO_ANSWER
        incoming, written, told = settled
        later = self._answers.pop(incoming)
        if written is None:
            later.set(PutReply.of([True]))
        else:
            visible = incoming.visible and not told
            self._puts.settle(
                [written], visible=visible, until_s=incoming.until_s, done=lambda each: later.set(PutReply.of(each))
            )
        self._puts.room_changed()
        return NO_ANSWER

    def tick(self) -> None:
        """Hang up on those who have begun a value and do not end it."""
        for peer in self.incoming.overdue(asyncio.get_running_loop().time()):
            assert isinstance(peer, Peer)
            peer.hang_up()

    def _gone(self, peer: Peer) -> None:
        self.incoming.gone(peer)
        self._answers = {incoming: later for incoming, later in self._answers.items() if not incoming.ended}
        self._puts.room_changed()
