"""Tells the master what the node holds: the connection, the time and the messages around ReportQueue.

One message is under way at a time. A put's report leaves in the same step of the event loop that kicked it, and
the master's answer reaches the put's client in the step in which it arrives; puts that come meanwhile share the next
message. Without a master the queue waits and the connection is tried again; a put's own deadline then ends its wait,
the chunk stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from tanghulu.discovery.masters import ATTEMPT_S, SEEK_PAUSE_S, MasterFinder
from tanghulu.errors import LeaseExpired, MasterUnavailable, NotLeader, TanghuluError
from tanghulu.protos import common_pb2, directory_pb2
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.greeting import show
from tanghulu.store.node.reporting.copy_wire import Orders, orders_from_wire
from tanghulu.store.node.state.confirmations import Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.report_queue import ReportMessage
from tanghulu.store.node.state.slot_report import SlotPiece
from tanghulu.store.protocol.methods import ANNOUNCE
from tanghulu.store.protocol.types import Tier
from tanghulu.types import Address, InstanceId

_log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
CALL_DEADLINE_S = 3.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5)
#: Between two messages of a node that waits until it may report, or until the master knows more slots.
_POLL_S = 0.2
#: Chunks of a report that are sorted into their slots in one step, about a millisecond.
_SORTED_AT_ONCE = 2048


class Reporter:
    """``run`` stays connected, ``tick`` keeps the times; ``on_change`` is called after answers changed chunks.

    ``on_unregistered`` is called when the master does not know this node: it is new, or another leads. ``on_orders``
    is told what the master wants copied or dropped.
    """

    def __init__(
        self,
        state: NodeState,
        masters: MasterFinder,
        generation: int,
        on_change: Callable[[], None],
        on_unregistered: Callable[[], None],
        on_orders: Callable[[Orders], None],
    ) -> None:
        self._state, self._chunks = state, state.chunks
        self._tenants, self._tier, self._hot = state.chunks.tenants, state.chunks.tier, state.chunks.hot
        self._queue = state.reports
        self._masters = masters
        self._master: Address | None = None  # that is connected, or was last
        self._on_unregistered = on_unregistered
        self._on_orders = on_orders
        self._failed_copies: list[str] = []
        self._call_deadline_s = ATTEMPT_S if masters.several else CALL_DEADLINE_S
        self._instance_id = InstanceId("")
        self._generation = generation
        self._on_change = on_change
        self._connection: AsyncFastConnection | None = None
        self._broken: asyncio.Future[None] | None = None
        self._sorting: asyncio.Task[None] | None = None
        self._free = False  # connected, and no message under way
        self._message = ReportMessage()
        self._sent_s = 0.0
        self._hot_told_s = 0.0
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._flushes: list[asyncio.Future[None]] = []
        self._flushing: list[asyncio.Future[None]] = []
        self.connected = asyncio.Event()

    # --- what the node's services ask

    def kick(self) -> None:
        """Send what there is to tell now, unless a message is under way."""
        if self._free and (self._queue.urgent or self._flushes or self._flushing):
            self._tell()

    def copy_failed(self, key: str) -> None:
        """An ordered copy failed; the master hears of it with the next message."""
        self._failed_copies.append(key)

    def confirm(self, chunks: Sequence[Holding], until_s: float, done: Done) -> None:
        """Call ``done`` with the master's word on each chunk: whether this put was the first of its key.

        MasterUnavailable comes in the place of those that it did not confirm until ``until_s`` (the loop's time);
        they stay and are reported later.
        """
        if self._queue.confirm(chunks, until_s, done):
            if self._timer is None or self._timer.when() > until_s:
                self._set_timer(until_s)
            self.kick()

    async def flushed(self, until_s: float) -> None:
        """Wait until the master knows everything that was removed before; raises MasterUnavailable at ``until_s``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._flushes.append(future)
        self.kick()
        try:
            async with asyncio.timeout_at(until_s):
                await future
        except TimeoutError:
            raise self._no_answer() from None

    def tick(self) -> None:
        """To be called every few hundredths of a second: signs of life, removals alone, a master that is silent."""
        now_s = asyncio.get_running_loop().time()
        connection = self._connection
        if self._queue.report_wanted:
            self._state.report_all()
        if self._queue.is_unsorted and (self._sorting is None or self._sorting.done()):
            self._sorting = asyncio.create_task(self._sort())
        if self._free:
            assert connection is not None
            pause_s = _POLL_S if self._queue.waits_for_master else HEARTBEAT_S
            if connection.closed or not self._queue.empty or now_s >= self._sent_s + pause_s:
                self._tell()
        elif connection is not None and now_s >= self._sent_s + self._call_deadline_s:
            connection.abort()

    # --- time

    def _set_timer(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(until_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        for chunk in self._queue.expire(asyncio.get_running_loop().time(), self._no_answer()):
            self._state.gave_up(chunk)
        if (next_s := self._queue.next_expiry_s) is not None:
            self._set_timer(next_s)
        self._on_change()

    def _no_answer(self) -> MasterUnavailable:
        return MasterUnavailable(
            f"the master at {self._master or self._masters.masters} did not answer this node before the deadline; "
            "what was put stays here and will be announced, what was removed is gone"
        )

    # --- the connection

    async def run(self, instance_id: InstanceId) -> None:
        """Report as ``instance_id`` until cancelled; the first message begins a full report."""
        self._instance_id = instance_id
        self._state.report_all()
        try:
            while True:
                try:
                    await self._converse()
                except TanghuluError as error:
                    await self._failed(error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._sorting is not None:
                self._sorting.cancel()
            await self._disconnect()

    async def _sort(self) -> None:
        """Prepare a report of everything in small steps."""
        while self._queue.is_unsorted:
            self._queue.sort_report(_SORTED_AT_ONCE)
            await asyncio.sleep(0)
        self.kick()

    async def _converse(self) -> None:
        """Be connected until that fails."""
        self._master = await self._masters.find()
        shown = self._masters.masters.credentials
        self._connection = await AsyncFastConnection.connect(self._master, shortcut=True, tls=shown.tls)
        await show(self._connection, shown, self._call_deadline_s)
        self._broken = asyncio.get_running_loop().create_future()
        self._tell()
        await self._broken

    async def _failed(self, error: TanghuluError) -> None:
        if self._failures == 0:
            _log.warning("reporter.failed", master=str(self._master), code=error.code, error=error.message)
        self.connected.clear()
        await self._disconnect()
        if isinstance(error, LeaseExpired):
            self._on_unregistered()
        elif self._master is not None:
            self._masters.failed(self._master, error)
        pause_s = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
        await asyncio.sleep(min(pause_s, SEEK_PAUSE_S) if self._masters.several else pause_s)
        self._failures += 1

    async def _disconnect(self) -> None:
        connection, self._connection, self._free = self._connection, None, False
        if connection is not None:
            await connection.close()

    # --- messages

    def _tell(self) -> None:
        assert self._connection is not None
        self._free = False
        self._flushing += self._flushes
        self._flushes.clear()
        self._message = message = self._queue.take()
        self._sent_s = asyncio.get_running_loop().time()
        request = directory_pb2.AnnounceRequest(
            node_id=self._instance_id,
            generation=self._generation,
            removed=[key for key, _ in message.removed],
            removed_versions=[version for _, version in message.removed],
            deleted=[key for key, _ in message.deleted],
            deleted_versions=[version for _, version in message.deleted],
            report_id=message.report_id,
            capacity_bytes=self._chunks.capacity_bytes,
            used_bytes=self._chunks.used_bytes,
            ssd_capacity_bytes=self._tier.capacity_bytes,
            ssd_used_bytes=self._tier.used_bytes,
            term=self._state.newest_term.number,
            term_of=self._state.newest_term.cluster,
        )
        for key, version in message.retracted:
            request.withdrawn.add(key=key, version=version)
        for chunk, unconfirmed in zip(message.added, message.unconfirmed, strict=True):
            entry = request.added.add(key=chunk.key, version=chunk.version, size_bytes=chunk.size_bytes)
            if chunk.tier is Tier.SSD:
                entry.tier = common_pb2.TIER_SSD
            if unconfirmed:
                entry.unconfirmed = True
            if chunk.replicas > 1:
                request.news.replicated.add(key=chunk.key, replicas=chunk.replicas)
        if message.piece is not None:
            _add_piece(request, message.piece)
        self._add_news(request)
        try:
            self._connection.send(ANNOUNCE.number, request, ANNOUNCE.reply, self._replied)
        except TanghuluError as error:
            self._replied(error)

    def _add_news(self, request: directory_pb2.AnnounceRequest) -> None:
        """What else the copy planner wants to know: copies that failed, what is hot, whether a drain may end."""
        state = self._state
        if self._failed_copies:
            request.news.failed.extend(self._failed_copies)
            self._failed_copies = []
        if state.draining and not (
            state.has_writers or request.added or self._queue.waits_for_master or not self._queue.empty
        ):
            request.news.quiet = True
        if self._sent_s >= self._hot_told_s + HEARTBEAT_S:
            self._hot_told_s = self._sent_s
            for key, num_gets in self._hot.take():
                request.news.hot.add(key=key, num_gets=num_gets)
            if self._tenants is not None:
                for tenant, num_bytes in self._tenants.bounded():
                    request.tenants.add(tenant=tenant, num_bytes=num_bytes)

    def _replied(self, outcome: Reply[directory_pb2.AnnounceReply] | TanghuluError) -> None:
        message = self._message
        if not isinstance(outcome, TanghuluError) and len(outcome.message.accepted) != len(message.added):
            outcome = MasterUnavailable(f"{self._master} did not answer all of {len(message.added)} announcements")
        elif not isinstance(outcome, TanghuluError) and not self._state.obeys(
            outcome.message.term, outcome.message.term_of
        ):
            outcome = NotLeader.naming("")
        if isinstance(outcome, TanghuluError):
            self._break(outcome)
            return
        self._free = True
        self._failures = 0
        reply = outcome.message
        if reply.num_nodes and self._tenants is not None:
            self._tenants.heard({each.tenant: each.num_bytes for each in reply.elsewhere}, reply.num_nodes)
        self._answered(message, reply)
        orders = orders_from_wire(reply)
        if orders is not None:
            self._on_orders(orders)
        self.kick()

    def _break(self, error: TanghuluError) -> None:
        self._queue.requeue()
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _decided(self, message: ReportMessage, reply: directory_pb2.AnnounceReply) -> None:
        """Take the master's decisions on chunks."""
        undecided = set(reply.undecided)
        for index, (chunk, stands) in enumerate(zip(message.added, reply.accepted, strict=True)):
            if index in undecided:
                self._queue.again(chunk)
            else:
                self._state.reported(chunk, accepted=stands)
        for index in reply.refused:
            if message.piece is not None and index < len(message.piece.chunks):
                self._state.reported(message.piece.chunks[index], accepted=False)

    def _answered(self, message: ReportMessage, reply: directory_pb2.AnnounceReply) -> None:
        self._queue.done()
        self._queue.granted(reply.report_keys, reply.known_slots)
        if not self.connected.is_set() and not self._queue.is_reporting:
            self.connected.set()
            _log.info("reporter.connected", master=str(self._master))
        self._decided(message, reply)
        if self._queue.removals_told:
            for future in self._flushing:
                if not future.done():
                    future.set_result(None)
            self._flushing.clear()
        if reply.report_wanted:
            _log.info("reporter.full_report", num_chunks=len(self._chunks))
            self._state.report_all()
        if message.added:  # the puts' clients are answered first
            asyncio.get_running_loop().call_soon(self._on_change)


def _add_piece(request: directory_pb2.AnnounceRequest, piece: SlotPiece) -> None:
    told = request.piece
    told.number, told.next_slot = piece.number, piece.next_slot
    chunks = piece.chunks
    told.keys.extend([chunk.key for chunk in chunks])
    told.versions.extend([chunk.version for chunk in chunks])
    told.sizes.extend([chunk.size_bytes for chunk in chunks])
    cold = bytes([chunk.tier is Tier.SSD for chunk in chunks])
    if any(cold):
        told.cold = cold
    for chunk in chunks:
        if chunk.replicas > 1:
            request.news.replicated.add(key=chunk.key, replicas=chunk.replicas)
