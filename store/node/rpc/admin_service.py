"""Requests of operators to a node over its fast lane: DRAIN, EVICT, VERIFY, TENANTS."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import structlog

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.fast_server import Answer, FastService, Peer
from tanghulu.store.node.rpc.service import session_of
from tanghulu.store.node.rpc.sessions import Session, after_drain
from tanghulu.store.node.state.counters import EvictionReason
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.writes.puts import PutService, Verifier
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import check_count
from tanghulu.store.protocol.messages import (
    Done,
    DrainRequest,
    Evicted,
    EvictRequest,
    TenantsReply,
    TenantsRequest,
    Verified,
    VerifiedPage,
    VerifyRequest,
)
from tanghulu.types import ChunkKey

_log = structlog.get_logger(__name__)
#: Limits of a page of VERIFY: number of chunks and, except for its last chunk, bytes.
MAX_VERIFIED = 4096
MAX_VERIFIED_BYTES = 256 << 20
#: Sessions whose position is kept between two pages of VERIFY; the oldest one restarts.
MAX_LISTINGS = 4
#: Bytes evicted before other calls are served.
_EVICTED_AT_ONCE = 16 << 20
#: Longest wait for the master to take a report and removals, and the interval of the checks.
REPORT_S = 10.0
_LOOK_S = 0.02
#: Keys sorted before other calls are served: about 5 ms.
_RUN_KEYS = 1 << 14


class SortedKeys:
    """All keys of one moment behind ``after``, in order, without duplicates; each costs the same to take."""

    def __init__(self, runs: list[list[ChunkKey]], after: str) -> None:
        self.after = after
        self._merged: Iterator[ChunkKey] = heapq.merge(*runs)
        self._next = next(self._merged, None)

    @classmethod
    async def of(cls, keys: list[ChunkKey], after: str) -> SortedKeys:
        """Sort ``keys`` in runs, yielding to other work in between."""
        runs: list[list[ChunkKey]] = []
        for begin in range(0, len(keys), _RUN_KEYS):
            runs.append(sorted(key for key in keys[begin : begin + _RUN_KEYS] if key > after))
            await asyncio.sleep(0)
        return cls(runs, after)

    @property
    def more(self) -> bool:
        """Whether there are keys left."""
        return self._next is not None

    def take(self) -> ChunkKey:
        """Return the next key; asserts that there is one."""
        key = self._next
        assert key is not None, "there are more"
        while self._next == key:
            self._next = next(self._merged, None)
        return key


class AdminService:
    """Registers its handlers by ``serve``. ``drain`` is awaited with whether the node is to be draining."""

    def __init__(self, state: NodeState, puts: PutService, drain: Callable[[bool], Coroutine[Any, Any, None]]) -> None:
        self._state, self._chunks = state, state.chunks
        self._puts = puts
        self._drain = drain
        self._listings: dict[int, SortedKeys] = {}  # by session

    def serve(self, service: FastService) -> None:
        """Answer the administrator's methods."""
        service.register(methods.DRAIN, self.drain)
        service.register(methods.EVICT, after_drain(self._state, self.evict))
        service.register(methods.VERIFY, after_drain(self._state, self.verify))
        service.register(methods.TENANTS, after_drain(self._state, self.tenants))

    def drain(self, peer: Peer, request: DrainRequest, attachment: memoryview) -> Coroutine[Any, Any, Answer]:
        """Refuse new chunks from now on, or accept them again; answered once the master is informed."""
        session_of(peer)
        return self._drained(request.draining)

    async def _drained(self, draining: bool) -> Answer:
        _log.info("node.draining" if draining else "node.undrained")
        await self._drain(draining)
        return Done()

    def evict(self, peer: Peer, request: EvictRequest, attachment: memoryview) -> Coroutine[Any, Any, Answer]:
        """Evict the named chunks, and more in the policy's order until enough bytes are free."""
        session_of(peer)
        check_count(len(request.keys))
        return self._evicted(request)

    async def _evicted(self, request: EvictRequest) -> Answer:
        gone = []
        for key in request.keys:
            chunk = self._chunks.find(ChunkKey(key))
            if chunk is not None and chunk.evictable:
                self._chunks.evict(chunk, EvictionReason.OPERATOR)
                gone.append(chunk)
        wanted = request.num_bytes
        while wanted > 0:
            some = self._chunks.evict_oldest(min(wanted, _EVICTED_AT_ONCE), EvictionReason.OPERATOR)
            if not some:
                break
            gone += some
            wanted -= sum(chunk.size_bytes for chunk in some)
            self._puts.room_changed()
            await asyncio.sleep(0)
        self._puts.room_changed()
        return Evicted(len(gone), sum(chunk.size_bytes for chunk in gone))

    def tenants(self, peer: Peer, request: TenantsRequest, attachment: memoryview) -> Answer:
        """Return the usage of each tenant here."""
        session_of(peer)
        tenants = self._chunks.tenants
        if tenants is None:
            raise InvalidRequest("this node has no tenants; start it with --tokens")
        return TenantsReply(tenants.usage())

    def verify(self, peer: Peer, request: VerifyRequest, attachment: memoryview) -> Coroutine[Any, Any, Answer]:
        """Return a page of the chunks here, in order of their keys, each compared with its checksums."""
        session = session_of(peer)
        if request.report:
            self._state.report_all()
            self._puts.report()
        return self._verified(session, request)

    async def _reported(self) -> None:
        """Wait until the master has the running report and all removals, or for REPORT_S."""
        reports = self._state.reports
        for _ in range(int(REPORT_S / _LOOK_S)):
            if not reports.is_reporting and reports.removals_acknowledged:
                return
            await asyncio.sleep(_LOOK_S)

    async def _verified(self, session: Session, request: VerifyRequest) -> Answer:
        keys = await self._keys_behind(session.session_id, request.after)
        limit = min(request.limit or MAX_VERIFIED, MAX_VERIFIED)
        page: list[Verified] = []
        num_bytes = 0
        verifier = Verifier(self._chunks, self._puts)
        while keys.more and len(page) < limit and num_bytes < MAX_VERIFIED_BYTES:
            key = keys.take()
            chunk = self._chunks.find(key)
            if chunk is None:
                entry = self._chunks.find_below(key)
                if entry is not None:  # it is only named: its bytes are verified whenever they are read
                    page.append(Verified(key, entry.version, entry.size_bytes))
                continue
            corrupt = not await verifier.is_intact(chunk)
            page.append(Verified(key, chunk.version, chunk.size_bytes, corrupt))
            if corrupt and request.drop_corrupt and self._chunks.find(key) is chunk:
                self._puts.verify(chunk)
            num_bytes += chunk.size_bytes
        more = keys.more
        if more:
            keys.after = page[-1].key
            self._listings[session.session_id] = keys
        if request.report or request.drop_corrupt:
            await self._reported()
        return VerifiedPage(page, more)

    async def _keys_behind(self, session_id: int, after: str) -> SortedKeys:
        """Return the keys behind the session's last page, or all keys in order once more."""
        keys = self._listings.pop(session_id, None)
        if keys is not None and keys.after == after:
            return keys
        while len(self._listings) >= MAX_LISTINGS:
            del self._listings[next(iter(self._listings))]
        return await SortedKeys.of(self._chunks.all_keys(), after)
