"""The node's fast lane: HELLO, PUT, RESERVE, COMMIT, GET, UNPIN, EXISTS, REMOVE, CHUNK_STAT, EVICTION.

An edge: translates messages to NodeState's terms and back. Calls that need no waiting are answered in the same loop
step. It is long because it is all methods of one carrier, which share sessions, deadlines, the cutting of large calls
into steps and the waiting for the master.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import structlog
from msgspec import structs

from tanghulu.auth.tenants import Right
from tanghulu.errors import ChunkNotFound, InvalidRequest, TanghuluError, Unauthorized
from tanghulu.rpc.fast_server import Answer, FastService, Handler, Later, PayloadSink, Peer
from tanghulu.rpc.methods import PROTOCOL_VERSION, Method
from tanghulu.rpc.slow_peers import PendingBytes
from tanghulu.rpc.wire import Failure
from tanghulu.store.node.rpc.metrics import TrafficCounters
from tanghulu.store.node.rpc.sessions import Greeting, Session, Sessions, after_drain
from tanghulu.store.node.ssd.promotion import Promoter
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import CommittedBy, Existed
from tanghulu.store.node.state.tenant_usage import Policies
from tanghulu.store.node.writes.puts import STEP_ITEMS, PutBatch, PutOutcome, PutService, Verifier, Written, remaining_s
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.directory_messages import check_count
from tanghulu.store.protocol.messages import (
    ChunkInfo,
    CommitItem,
    CommitRequest,
    Done,
    EvictionPolicy,
    Found,
    GetReply,
    GetRequest,
    KeysReply,
    KeysRequest,
    NodeHello,
    OpenBufferReply,
    OpenBufferRequest,
    PutReply,
    PutRequest,
    RemoveRequest,
    Reservation,
    ReserveReply,
    ReserveRequest,
    StatReply,
    UnpinRequest,
    Welcome,
)
from tanghulu.store.protocol.shared_index import IndexPlace
from tanghulu.store.protocol.types import MAX_MESSAGE_BYTES, NewChunk
from tanghulu.transfer_engine.core.segment import SegmentDescriptor
from tanghulu.types import ChunkKey, LeaseId

_log = structlog.get_logger(__name__)

#: Payload in one answer; values beyond it are pinned instead, and so is each value above MAX_MESSAGE_BYTES.
MAX_INLINE_ANSWER_BYTES = 4 << 20
#: Part of the memory pinned by one answer made key by key; its first key may be larger.
MAX_PINNED_FRACTION = 1 / 8
DEFAULT_DEADLINE_S = 5.0
#: An item of COMMIT: a reservation no longer being written, or its error, and its checksums.
_Ended: TypeAlias = tuple[Chunk | TanghuluError, Checksums]
#: A delayed answer: waiting for the master, or for room first.
Pending: TypeAlias = Later | Coroutine[Any, Any, Answer]


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The node's identity in HELLO."""

    instance_id: str
    generation: int
    segment: SegmentDescriptor
    index: IndexPlace | None = None


class NodeService:
    """Registers its handlers by ``serve``. ``state`` of a Peer is its Session."""

    def __init__(
        self,
        identity: NodeIdentity,
        state: NodeState,
        puts: PutService,
        sessions: Sessions,
        traffic: TrafficCounters,
        promoter: Promoter | None = None,
        policies: Policies = Policies(),  # noqa: B008 - it is immutable
    ) -> None:
        self._policies = policies
        self._identity = identity
        self._state, self._chunks, self._leases = state, state.chunks, state.leases
        self._puts = puts
        self._sessions = sessions
        self._traffic = traffic
        self._promoter = promoter
        self._unsent = PendingBytes()
        self._unpinning: set[asyncio.Task[None]] = set()

    def serve(self, service: FastService) -> None:
        """Answer the node's methods."""
        self._unsent = service.unsent
        service.register(methods.HELLO, self.hello)
        service.register(methods.OPEN_BUFFER, self.open_buffer)
        handlers: list[tuple[Method[Any, Any], Handler]] = [
            (methods.PUT, self.put),
            (methods.RESERVE, self.reserve),
            (methods.COMMIT, self.commit),
            (methods.GET, self.get),
            (methods.UNPIN, self.unpin),
            (methods.EXISTS, self.exists),
            (methods.REMOVE, self.remove),
            (methods.CHUNK_STAT, self.stat),
            (methods.EVICTION, self.eviction),
        ]
        for method, handler in handlers:
            service.register(method, after_drain(self._state, handler))
        service.register_sink(methods.PUT, self.receive)

    # --- sessions

    def hello(self, peer: Peer, request: NodeHello, attachment: memoryview) -> Answer:
        """Open or join the client's session."""
        if peer.state is not None:
            raise InvalidRequest("HELLO came twice; it must be the first call only")
        if not request.client_id:
            raise InvalidRequest("this is a store node, and HELLO lacks a client id")
        who = peer.identity
        may_map = who is None or who.shared_memory
        shm = may_map and request.wants_shm and request.host_id == self._identity.segment.host_id
        client_id = request.client_id if who is None else who.scope + request.client_id
        may_write = who is None or who.may(Right.WRITE)
        held = frozenset(request.held_lease_ids)
        greeting = Greeting(client_id, peer.pid if may_map else None, shm, held, may_write, peer.pidfd)
        session = self._sessions.open(greeting)
        peer.state = session
        peer.on_close.append(lambda: self._sessions.leave(session))
        own = self._identity
        welcome = Welcome(PROTOCOL_VERSION, own.instance_id, own.generation, session.key, own.segment)
        if not may_map:
            return welcome
        return msgspec.structs.replace(welcome, index=own.index, key_scope="" if who is None else who.scope)

    # --- puts

    def open_buffer(self, peer: Peer, request: OpenBufferRequest, attachment: memoryview) -> Answer:
        """Return a write buffer for a client that maps the memory; none if there is none to spare."""
        session = session_of(peer)
        who = peer.identity
        scope, puts_kv = ("", True) if who is None else (who.scope, who.may(Right.KV))
        maps = session.holder.maps
        place = self._state.grant_buffer(session.session_id, request.value_bytes, scope, puts_kv) if maps else None
        self._puts.room_changed()
        return OpenBufferReply(place)

    def put(self, peer: Peer, request: PutRequest, attachment: memoryview) -> Pending:
        """Put values sent in the request."""
        session_of(peer)
        values = cut_values(request.items, attachment)
        self._traffic.bytes_written["inline"] += len(attachment)
        until_s, master_s = self._until(request.deadline_ms), self._until(request.master_ms or request.deadline_ms)
        batch = PutBatch(self._puts, request.items, values=values, visible=request.visible)
        batch.step()
        if not batch.is_complete:
            return self._put_rest(batch, request.visible, until_s, master_s)
        return self._settle(batch.written, request.visible, master_s)

    def receive(self, peer: Peer, request: PutRequest, num_bytes: int) -> PayloadSink | None:
        """Return the range for the value of an incoming PUT; None if ``put`` is to copy it."""
        session_of(peer)
        until_s = self._until(request.master_ms or request.deadline_ms)
        if [new.size_bytes for new in request.items] != [num_bytes]:
            return None
        self._state.drain_buffers()
        (new,) = request.items
        chunk = self._puts.incoming.begin(peer, new)
        if chunk is None:
            return None
        return PayloadSink(self._puts.bytes_of(chunk), lambda: self._arrived(peer, new, request.visible, until_s))

    def _arrived(self, peer: Peer, new: NewChunk, visible: bool, until_s: float) -> Later:
        self._state.drain_buffers()
        self._traffic.bytes_written["inline"] += new.size_bytes
        written = self._puts.commit_incoming(peer, new, visible=visible)
        self._puts.room_changed()
        return self._settle((written,), visible, until_s)

    async def _put_rest(self, batch: PutBatch, visible: bool, until_s: float, master_s: float) -> Answer:
        written = await batch.finish(until_s)
        outcomes = await self._puts.settled(written, visible=visible, until_s=master_s)
        return PutReply.of(outcomes, self._state.newest_term)

    def reserve(self, peer: Peer, request: ReserveRequest, attachment: memoryview) -> Answer | Pending:
        """Reserve ranges for the client to write."""
        check_count(len(request.items))
        batch = PutBatch(self._puts, request.items, holder=session_of(peer).holder)
        # Clients without access to memory must not find another tenant's data in its ranges.
        wipes = peer.identity is not None and not peer.identity.shared_memory
        if not wipes:
            batch.step()
        if wipes or not batch.is_complete or (request.visible and self._puts.awaits_master(batch.written)):
            return self._reserve_rest(batch, self._until(request.deadline_ms), request.visible, wipes)
        return _reserve_reply(batch.written)

    async def _reserve_rest(self, batch: PutBatch, until_s: float, visible: bool, wipes: bool) -> Answer:
        try:
            reserved = await batch.finish(until_s)
            if wipes:
                await self._puts.wipe(reserved)
            if visible:
                reserved = await self._puts.existing_known(reserved, until_s)
        except BaseException:  # its connection has ended: no client will receive these ranges
            self._puts.take_back(batch.written)
            raise
        return _reserve_reply(reserved)

    def commit(self, peer: Peer, request: CommitRequest, attachment: memoryview) -> Pending:
        """Publish ranges written by the client, release those that it did not write."""
        check_count(len(request.items))
        session = session_of(peer)
        if len(request.aborted) <= STEP_ITEMS:
            self._leases.unpin(request.aborted, session.owned)
        few = len(request.items) <= STEP_ITEMS and len(request.aborted) <= STEP_ITEMS
        if few and all(item.checksums.parts for item in request.items):
            return self._commit(request, self._end_writing(peer, request, request.items))
        return self._commit_in_steps(peer, request)

    async def _commit_in_steps(self, peer: Peer, request: CommitRequest) -> Answer:
        """Commit many items; or values without checksums, which the node computes once nobody writes them any more.

        Refused items are finished in their own step.
        """
        if len(request.aborted) > STEP_ITEMS:
            await self._unpin_all(session_of(peer), request.aborted)
        outcomes: list[bool | Failure] = []
        ended: dict[int, tuple[Chunk, Checksums]] = {}  # accepted items, by position
        try:
            for at in range(0, len(request.items), STEP_ITEMS):
                some = self._end_writing(peer, request, request.items[at : at + STEP_ITEMS])
                for place, (chunk, checksums) in enumerate(some, at):
                    if isinstance(chunk, TanghuluError):
                        outcomes.append(Failure.of(chunk))
                    else:
                        outcomes.append(False)
                        ended[place] = chunk, checksums
                await asyncio.sleep(0)
            for place, (chunk, checksums) in ended.items():
                if not checksums.parts:
                    ended[place] = chunk, await self._puts.compute_checksums(chunk)
            places, num_committed = list(ended), sum(place < request.num_committed for place in ended)
            written: list[Written] = []
            num_known = 0
            for at in range(0, len(places), STEP_ITEMS):
                step = [ended.pop(place) for place in places[at : at + STEP_ITEMS]]
                more, num_more = self._commit_written(request, step, num_committed - at if num_known == at else 0)
                written += more
                num_known += num_more
                await asyncio.sleep(0)
        except BaseException:  # its connection has ended
            self._puts.abort([chunk for chunk, _ in ended.values()])
            raise
        until_s = self._until(request.deadline_ms)
        settled = await self._puts.settled(written, visible=request.visible, until_s=until_s, num_known=num_known)
        for place, outcome in zip(places, PutReply.of(settled).outcomes, strict=True):
            outcomes[place] = outcome
        return PutReply(outcomes, self._state.newest_term)

    def _end_writing(self, peer: Peer, request: CommitRequest, items: Sequence[CommitItem]) -> list[_Ended]:
        """Return for each item its reservation, no longer being written, and the checksums sent by the client."""
        ended: list[_Ended] = []
        session_id = session_of(peer).session_id
        for item in items:
            lease_id, checksums = LeaseId(item.lease_id), item.checksums
            lease = self._leases.lease(lease_id)
            try:
                chunk = self._puts.end_writing(lease_id, session_id)
            except TanghuluError as error:
                ended.append((error.with_traceback(None), checksums))
                continue
            ended.append((chunk, checksums if checksums.parts else chunk.checksums))
            if lease is not None and lease.mapped:
                self._traffic.bytes_written["shm"] += lease.length
        return ended

    def _commit(self, request: CommitRequest, ended: Sequence[_Ended]) -> Later:
        written, num_known = self._commit_written(request, ended, request.num_committed)
        return self._settle(written, request.visible, self._until(request.deadline_ms), num_known)

    def _commit_written(
        self, request: CommitRequest, ended: Sequence[_Ended], num_committed: int
    ) -> tuple[list[Written], int]:
        """Make chunks of the client's writes; return them, and how many leading ones the master knows.

        The client has committed the first ``num_committed`` there, which counts if it is valid for all that are here.
        """
        chunks = [each for each, _ in ended if isinstance(each, Chunk)]
        valid = all(self._state.is_commit_valid(each, request.generation, request.term) for each in chunks)
        num_known = max(0, min(num_committed, len(ended))) if valid else 0
        written: list[Written] = []
        for place, (chunk, checksums) in enumerate(ended):
            by = CommittedBy.CLIENT if place < num_known else CommittedBy.node(visible=request.visible)
            try:
                written.append(self._state.commit(chunk, checksums, by) if isinstance(chunk, Chunk) else chunk)
            except TanghuluError as error:
                written.append(error.with_traceback(None))
        self._puts.room_changed()
        return written, num_known

    def _settle(self, written: Sequence[Written], visible: bool, until_s: float, num_known: int = 0) -> Later:
        later = Later()

        def done(outcomes: list[PutOutcome]) -> None:
            later.set(PutReply.of(outcomes, self._state.newest_term))

        self._puts.settle(written, visible=visible, until_s=until_s, done=done, num_known=num_known)
        return later

    # --- gets

    def get(self, peer: Peer, request: GetRequest, attachment: memoryview) -> Answer | Coroutine[Any, Any, Answer]:
        """Return small values inside the answer, others pinned; those on the SSD are promoted first."""
        check_count(len(request.keys))
        session = session_of(peer)
        if self._promoter is not None and self._promoter.is_cold(request.keys):
            return self._get_key_by_key(session, request, self._promoter)
        if len(request.keys) > STEP_ITEMS:
            return self._get_in_steps(session, request)
        items, values = self._get(session, request.keys, request.max_inline_bytes, MAX_INLINE_ANSWER_BYTES)
        return GetReply(items, self._leases.lease_ms, self._state.newest_term), values

    async def _get_in_steps(self, session: Session, request: GetRequest) -> Answer:
        """Get many keys."""
        items: list[Found | Failure] = []
        values: list[bytes | memoryview] = []
        num_bytes, answer = 0, object()
        try:
            for at in range(0, len(request.keys), STEP_ITEMS):
                some, more = self._get(
                    session,
                    request.keys[at : at + STEP_ITEMS],
                    request.max_inline_bytes,
                    MAX_INLINE_ANSWER_BYTES - num_bytes,
                )
                items += some
                values += more
                num_bytes += sum(map(len, more))
                self._unsent.note(answer, num_bytes)
                await asyncio.sleep(0)
            await self._touch_again(request.keys)
        finally:
            self._unsent.note(answer, 0)
        return GetReply(items, self._leases.lease_ms, self._state.newest_term), values

    async def _touch_again(self, keys: Sequence[str]) -> None:
        """Touch ``keys`` in the order of the prompt, the last ones first, as one step of a smaller call would."""
        for at in reversed(range(0, len(keys), STEP_ITEMS)):
            found = (self._chunks.find(ChunkKey(key)) for key in keys[at : at + STEP_ITEMS])
            self._chunks.touch([chunk for chunk in found if chunk is not None])
            self._chunks.end_call()
            await asyncio.sleep(0)

    async def _get_key_by_key(self, session: Session, request: GetRequest, promoter: Promoter) -> Answer:
        """Get keys one by one, as they are promoted from the SSD: memory may not have room for all.

        So beyond a part of the memory the answer ends, and the client asks again for the remaining keys.
        """
        items: list[Found | Failure] = []
        values: list[bytes | memoryview] = []
        num_bytes, pinned_bytes, answer = 0, 0, object()
        try:
            num_looked = 0
            async for key, error, from_ssd in promoter.each(request.keys, self._until(request.deadline_ms)):
                num_looked += 1
                if num_looked % STEP_ITEMS == 0:
                    await asyncio.sleep(0)
                if error is not None:
                    items.append(Failure.of(error))
                    continue
                one, more = self._get(session, [key], request.max_inline_bytes, MAX_INLINE_ANSWER_BYTES - num_bytes)
                items += [structs.replace(each, from_ssd=from_ssd) if isinstance(each, Found) else each for each in one]
                values += more
                num_bytes += sum(map(len, more))
                self._unsent.note(answer, num_bytes)
                pinned_bytes += sum(each.size_bytes for each in one if isinstance(each, Found) and each.lease_id)
                if pinned_bytes >= self._chunks.capacity_bytes * MAX_PINNED_FRACTION:
                    break
            await self._touch_again(request.keys)
        finally:
            self._unsent.note(answer, 0)
        return GetReply(items, self._leases.lease_ms, self._state.newest_term), values

    def _get(
        self, session: Session, keys: Sequence[str], max_inline_bytes: int, budget: int
    ) -> tuple[list[Found | Failure], list[bytes | memoryview]]:
        """Return ``keys`` inside the answer as far as ``budget`` allows, the others pinned."""
        items: list[Found | Failure] = []
        values: list[bytes | memoryview] = []
        left_bytes = budget = min(budget, self._unsent.room_bytes)
        max_inline_bytes = min(max_inline_bytes, MAX_MESSAGE_BYTES)
        touched: list[Chunk] = []
        for key in keys:
            try:
                chunk = self._look_up(key)
                is_inline = chunk.size_bytes <= max_inline_bytes and chunk.size_bytes <= left_bytes
                pinned = None if is_inline else self._leases.pin(chunk, session.holder)
            except TanghuluError as error:
                items.append(Failure.of(error))
                continue
            touched.append(chunk)
            if pinned is None:
                values.append(bytes(self._puts.bytes_of(chunk)))
                left_bytes -= chunk.size_bytes
                lease_id, offset, copies_only = 0, 0, False
            else:
                lease_id, offset, copies_only = pinned.lease_id, chunk.offset, pinned.copies_only
            items.append(Found(chunk.size_bytes, chunk.version, chunk.checksums, lease_id, offset, copies_only))
        self._chunks.touch(touched)
        self._traffic.bytes_read["inline"] += budget - left_bytes
        return items, values

    def _look_up(self, key: str) -> Chunk:
        chunk = self._chunks.look_up(ChunkKey(key))
        if chunk is None:
            raise ChunkNotFound(f"{key!r} is not on {self._identity.instance_id}")
        return chunk

    def unpin(self, peer: Peer, request: UnpinRequest, attachment: memoryview) -> Answer | Coroutine[Any, Any, Answer]:
        """End leases, even if the rest is refused; check chunks reported corrupt by a reader."""
        session = session_of(peer)
        self._traffic.bytes_read["shm"] += request.bytes_read
        if len(request.lease_ids) > STEP_ITEMS or len(request.read) > STEP_ITEMS:
            return self._unpin_in_steps(session, request)
        self._unpin(session, request.lease_ids, request.read)
        return self._look_at(request.corrupt) if request.corrupt else Done()

    def _unpin(self, session: Session, lease_ids: Sequence[int], read: Sequence[str] = ()) -> None:
        if read:
            found = (self._chunks.look_up(ChunkKey(key)) for key in read)
            self._chunks.touch([chunk for chunk in found if chunk is not None])
        self._leases.unpin(lease_ids, session.owned)
        self._puts.room_changed()

    async def _unpin_in_steps(self, session: Session, request: UnpinRequest) -> Answer:
        await self._unpin_all(session, request.lease_ids, request.read)
        check_count(len(request.read))
        return await self._look_at(request.corrupt)

    async def _unpin_all(self, session: Session, lease_ids: Sequence[int], read: Sequence[str] = ()) -> None:
        """End many leases; all of them, even if the connection ends meanwhile: its session may live on."""

        async def steps() -> None:
            for at in reversed(range(0, max(len(lease_ids), len(read)), STEP_ITEMS)):  # as in ``_touch_again``
                self._unpin(session, lease_ids[at : at + STEP_ITEMS], read[at : at + STEP_ITEMS])
                await asyncio.sleep(0)

        unpinning = asyncio.ensure_future(steps())
        self._unpinning.add(unpinning)
        unpinning.add_done_callback(self._unpinning.discard)
        await asyncio.shield(unpinning)

    async def _look_at(self, keys: Sequence[str]) -> Answer:
        check_count(len(keys))
        verifier = Verifier(self._chunks, self._puts)
        for key in keys:
            chunk = self._chunks.find(ChunkKey(key))
            if chunk is not None:
                await verifier.drop_if_corrupt(chunk)
        return Done()

    # --- questions

    def exists(self, peer: Peer, request: KeysRequest, attachment: memoryview) -> Answer:
        """Return one byte a key; neither pins nor touches."""
        check_count(len(request.keys))
        holds = self._chunks.holds
        return KeysReply(bytes(holds(ChunkKey(key)) for key in request.keys))

    def remove(self, peer: Peer, request: RemoveRequest, attachment: memoryview) -> Coroutine[Any, Any, Answer]:
        """Drop chunks; one byte a key."""
        check_count(len(request.keys))
        until_s = self._until(request.deadline_ms)
        since = 0 if self._promoter is None else self._promoter.num_decided
        removed = self._remove(request.keys[:STEP_ITEMS])
        return self._removed(request.keys, removed, since, until_s)

    def _remove(self, keys: Sequence[str]) -> bytes:
        removed = bytes(self._chunks.remove(ChunkKey(key)) for key in keys)
        self._puts.room_changed()
        return removed

    async def _removed(self, keys: Sequence[str], removed: bytes, since: int, until_s: float) -> Answer:
        for at in range(STEP_ITEMS, len(keys), STEP_ITEMS):
            await asyncio.sleep(0)
            removed += self._remove(keys[at : at + STEP_ITEMS])
        await self._puts.removals_acknowledged(until_s)
        if self._promoter is not None:
            await self._promoter.settled(since, until_s)
        return KeysReply(removed)

    def stat(self, peer: Peer, request: KeysRequest, attachment: memoryview) -> Answer:
        """Return the facts of each chunk."""
        check_count(len(request.keys))
        return StatReply([_chunk_info(self._chunks, ChunkKey(key)) for key in request.keys])

    def eviction(self, peer: Peer, request: EvictionPolicy, attachment: memoryview) -> Answer:
        """Return the eviction policy, after switching to another if one is named."""
        session_of(peer)
        wanted = request.name
        if wanted and wanted != self._chunks.eviction_policy:
            self._policies.memory(wanted)  # raises for an unknown name before anything changes
            self._chunks.switch_policies(lambda: self._policies.memory(wanted), lambda: self._policies.tier(wanted))
            _log.info("node.eviction_policy", policy=wanted)
        return EvictionPolicy(self._chunks.eviction_policy)

    def _until(self, deadline_ms: int) -> float:
        return asyncio.get_running_loop().time() + remaining_s(deadline_ms, DEFAULT_DEADLINE_S)


def _chunk_info(chunks: NodeChunks, key: ChunkKey) -> ChunkInfo | None:
    """Return the chunk, in memory or on the SSD; None if it is not here."""
    chunk = chunks.find(key)
    held = chunk or chunks.find_below(key)
    if held is None:
        return None
    num_leases, age_s, num_hits = (
        (0, 0.0, 0) if chunk is None else (chunk.num_leases, chunks.age_s(chunk), chunk.num_hits)
    )
    left_s = chunks.left_s(held)
    return ChunkInfo(
        "",
        held.size_bytes,
        held.version,
        (),
        held.checksums,
        held.pin,
        num_leases,
        age_s,
        num_hits,
        held.tier,
        held.replicas,
        None if left_s is None else max(0.001, round(left_s, 3)),
    )


def _reserve_reply(reserved: Sequence[Written]) -> ReserveReply:
    return ReserveReply(
        [
            Failure.of(outcome)
            if isinstance(outcome, TanghuluError)
            else None
            if isinstance(outcome, Existed)
            else Reservation(outcome.lease_id, outcome.chunk.offset, outcome.copies_only)
            for outcome in reserved
        ]
    )


def cut_values(items: Sequence[NewChunk], data: memoryview) -> list[memoryview]:
    """Return the values concatenated in ``data``; raises InvalidRequest if the sizes do not add up."""
    check_count(len(items))
    if len(items) == 1 and items[0].size_bytes == len(data):
        return [data]
    ends = list(itertools.accumulate((new.size_bytes for new in items), initial=0))
    if ends[-1] != len(data):
        raise InvalidRequest(f"the values' sizes add up to {ends[-1]} bytes, but {len(data)} arrived")
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def session_of(peer: Peer) -> Session:
    """Return the session of a connection; raises Unauthorized if it has none."""
    session = peer.state
    if not isinstance(session, Session):
        raise Unauthorized("the first call on a connection must be HELLO")
    return session
