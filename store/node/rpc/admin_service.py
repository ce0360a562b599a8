"""What operators ask of a node over its fast lane: DRAIN, EVICT, VERIFY, TENANTS."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import structlog

from tanghulu.errors import InvalidRequest, Unauthorized
from tanghulu.protos import store_pb2
from tanghulu.rpc.fast_server import Answer, FastService, Peer
from tanghulu.store.node.rpc.sessions import Session, after_drain
from tanghulu.store.node.rpc.stats import check_count
from tanghulu.store.node.rpc.verifying import Verifier
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.counters import EvictionReason
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.writes.puts import PutService
from tanghulu.store.protocol import methods
from tanghulu.types import ChunkKey

_log = structlog.get_logger(__name__)
#: A page of VERIFY has at most so many chunks and, but for its last chunk, bytes.
MAX_VERIFIED = 4096
MAX_VERIFIED_BYTES = 256 << 20


class AdminService:
    """Registers its handlers by ``serve``. ``drain`` is awaited with whether the node shall be draining."""

    def __init__(self, state: NodeState, puts: PutService, drain: Callable[[bool], Coroutine[Any, Any, None]]) -> None:
        self._state = state
        self._puts = puts
        self._drain = drain

    def serve(self, service: FastService) -> None:
        """Answer the administrator's methods."""
        service.register(methods.DRAIN, self.drain)
        service.register(methods.EVICT, after_drain(self._state, self.evict))
        service.register(methods.VERIFY, after_drain(self._state, self.verify))
        service.register(methods.TENANTS, after_drain(self._state, self.tenants))

    def drain(self, peer: Peer, request: store_pb2.DrainRequest, attachment: memoryview) -> Coroutine[Any, Any, Answer]:
        """Take no new chunks from now on, or take them again; answered when the master knows."""
        _require_session(peer)
        return self._drained(request.draining)

    async def _drained(self, draining: bool) -> Answer:
        _log.info("node.draining" if draining else "node.undrained")
        await self._drain(draining)
        return store_pb2.DrainReply()

    def evict(self, peer: Peer, request: store_pb2.EvictRequest, attachment: memoryview) -> Answer:
        """Evict the named chunks, and in the policy's order until enough bytes are free."""
        _require_session(peer)
        check_count(len(request.keys))
        named = (self._state.find(ChunkKey(key)) for key in request.keys)
        sizes = [self._evict(chunk) for chunk in named if chunk is not None and chunk.evictable]
        if request.num_bytes:
            wanted = request.num_bytes
            for chunk in self._state.victims():
                if wanted <= 0:
                    break
                sizes.append(self._evict(chunk))
                wanted -= sizes[-1]
        self._puts.room_changed()
        return store_pb2.EvictReply(num_chunks=len(sizes), num_bytes=sum(sizes))

    def _evict(self, chunk: Chunk) -> int:
        self._state.evict(chunk, EvictionReason.OPERATOR)
        return chunk.size_bytes

    def tenants(self, peer: Peer, request: store_pb2.TenantsRequest, attachment: memoryview) -> Answer:
        """What each tenant holds and does here."""
        _require_session(peer)
        tenants = self._state.tenants
        if tenants is None:
            raise InvalidRequest("this node knows no tenants; start it with --tokens")
        return store_pb2.TenantsReply(tenants=[store_pb2.TenantUsage(**asdict(usage)) for usage in tenants.usage()])

    def verify(
        self, peer: Peer, request: store_pb2.VerifyRequest, attachment: memoryview
    ) -> Coroutine[Any, Any, Answer]:
        """A page of the chunks here, in order of their keys, each compared with its checksums."""
        _require_session(peer)
        if request.report:
            self._state.report_all()
            self._puts.report()
        return self._verified(request)

    async def _verified(self, request: store_pb2.VerifyRequest) -> Answer:
        limit = min(request.limit or MAX_VERIFIED, MAX_VERIFIED)
        keys = heapq.nsmallest(limit + 1, (key for key in self._state.all_keys() if key > request.after))
        reply = store_pb2.VerifyReply(more=len(keys) > limit)
        num_bytes = 0
        verifier = Verifier(self._state, self._puts)
        for key in keys[:limit]:
            if num_bytes >= MAX_VERIFIED_BYTES:
                reply.more = True
                break
            chunk = self._state.find(key)
            if chunk is None:
                self._add_below(reply, key)
                continue
            corrupt = not await verifier.is_intact(chunk)
            reply.chunks.add(key=key, version=chunk.version, size_bytes=chunk.size_bytes, corrupt=corrupt)
            if corrupt and request.drop_corrupt and self._state.find(key) is chunk:
                self._puts.verify(chunk)
            num_bytes += chunk.size_bytes
        return reply

    def _add_below(self, reply: store_pb2.VerifyReply, key: ChunkKey) -> None:
        """A chunk on the SSD is named only: its bytes are verified whenever they are read."""
        entry = self._state.find_below(key)
        if entry is not None:
            reply.chunks.add(key=key, version=entry.version, size_bytes=entry.size_bytes)


def _require_session(peer: Peer) -> None:
    if not isinstance(peer.state, Session):
        raise Unauthorized("say HELLO first")
