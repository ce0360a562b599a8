"""Reports of a node's chunks to the masters: a conversation with each, and the state of the whole node.

One message is in flight to each master at a time. A put's report leaves in the same step of the event loop that kicked
it, and the master's answer reaches the put's client in the step in which it arrives; puts that arrive meanwhile share
the next message. Without a master its outbox waits and the connection is retried; a put's own deadline then ends its
wait, the chunk stays.

The node learns in the same way as clients that several masters share the keys: one that does not own reported keys
answers KeysMoved, and is asked for the map. From then on each owner gets reports of its ranges, and the leader
heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import structlog

from tanghulu.discovery.masters import SEEK_MOST_S, SEEK_PAUSE_S, MasterFinder
from tanghulu.errors import KeysMoved, LeaseExpired, MasterUnavailable, TanghuluError
from tanghulu.runtime.clock import Backoff
from tanghulu.store.node.reporting.conversation import HEARTBEAT_S, MasterConversation
from tanghulu.store.node.state.confirmations import Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outbox import ReportMessage
from tanghulu.store.protocol.announcements import AnnounceReply, ChunkEntry, NodeAnnouncement, Orders, ReportPiece
from tanghulu.store.protocol.key_slots import bits_of
from tanghulu.store.protocol.messages import MastersRequest
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Term
from tanghulu.store.protocol.types import Tier
from tanghulu.types import Address, ChunkKey, InstanceId

_log = structlog.get_logger(__name__)

#: Chunks of a report sorted into their slots in one step, about a millisecond.
_SORTED_AT_ONCE = 2048


class Reporter:
    """``run`` stays connected, ``tick`` checks the times; ``on_change`` is called after answers changed chunks.

    ``on_unregistered`` is called when the leader does not know this node: it is new, or another leads. ``on_orders``
    gets a master's orders to copy or drop chunks.
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
        self._state, self._chunks, self._reports = state, state.chunks, state.reports
        self._masters = masters
        self._on_unregistered = on_unregistered
        self._on_orders = on_orders
        self._on_change = on_change
        self._instance_id = InstanceId("")
        self._generation = generation
        self._leader = self._conversation(None)
        self._owners: dict[Address, tuple[MasterConversation, asyncio.Task[None]]] = {}
        self._tasks = asyncio.TaskGroup()
        self._map_wanted = asyncio.Event()
        self._informant: MasterConversation | None = None  # the one whose master seems to know another map
        self._sorting: asyncio.Task[None] | None = None
        self._hot_s = 0.0
        self._tenants_sent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.connected = asyncio.Event()

    def _conversation(self, owner: Address | None) -> MasterConversation:
        outbox = self._reports.leader if owner is None else self._reports.owners[owner]
        return MasterConversation(
            self._state, outbox, owner, self._masters, self._announcement, self._replied, self._failed
        )

    def _all(self) -> Iterator[MasterConversation]:
        yield self._leader
        for conversation, _ in self._owners.values():
            yield conversation

    # --- requests of the node's services

    def kick(self) -> None:
        """Send urgent events now, unless a message is in flight."""
        for conversation in self._all():
            conversation.kick()

    def copy_failed(self, key: str) -> None:
        """Report a failed copy to the master that ordered it, with the next message."""
        self._reports.copy_failed(ChunkKey(key))

    def confirm(self, chunks: Sequence[Holding], until_s: float, done: Done) -> None:
        """Call ``done`` with the masters' decision on each chunk: whether this put was the first of its key.

        MasterUnavailable replaces the decisions not received by ``until_s`` (the loop's time); those chunks stay and
        are reported later.
        """
        if self._reports.confirm(chunks, until_s, done):
            if self._timer is None or self._timer.when() > until_s:
                self._set_timer(until_s)
            self.kick()

    async def flushed(self, until_s: float) -> None:
        """Wait until all masters have acknowledged the earlier removals; raises MasterUnavailable at ``until_s``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not future.done():
                future.set_result(None)

        self._reports.flush(done)
        self.kick()
        try:
            async with asyncio.timeout_at(until_s):
                await future
        except TimeoutError:
            raise self._no_answer() from None
        finally:
            self._reports.forget_flush(done)

    def tick(self) -> None:
        """Check the times; to be called every few hundredths of a second."""
        self._reports.settle_gone()
        self._state.begin_reports()
        if self._reports.unsorted is not None and (self._sorting is None or self._sorting.done()):
            self._sorting = asyncio.create_task(self._sort())
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._hot_s + HEARTBEAT_S:
            self._hot_s = now_s
            self._reports.report_hot(self._chunks.hot.take())
        for conversation in self._all():
            conversation.tick(now_s)

    # --- time

    def _set_timer(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(until_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        for chunk in self._reports.expire(asyncio.get_running_loop().time(), self._no_answer()):
            self._state.gave_up(chunk)
        if (next_s := self._reports.next_expiry_s) is not None:
            self._set_timer(next_s)
        self._on_change()

    def _no_answer(self) -> MasterUnavailable:
        masters = list(map(str, self._reports.owners)) or self._leader.master or self._masters.masters
        return MasterUnavailable(
            f"the master at {masters} did not answer this node before the deadline; "
            "stored chunks stay here and are reported later, removed ones are gone"
        )

    # --- the masters

    async def run(self, instance_id: InstanceId) -> None:
        """Report as ``instance_id`` until cancelled; the first message begins a full report."""
        self._instance_id = instance_id
        self._state.report_all()
        try:
            async with self._tasks:
                self._tasks.create_task(self._leader.run())
                self._tasks.create_task(self._learn_maps())
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._sorting is not None:
                self._sorting.cancel()

    async def _sort(self) -> None:
        """Prepare reports of everything in small steps."""
        while (chunks := self._reports.unsorted) is not None:
            chunks.sort(_SORTED_AT_ONCE)
            await asyncio.sleep(0)
        self.kick()

    async def _learn_maps(self) -> None:
        """Request the map while the known one is not that of the masters."""
        backoff = Backoff(SEEK_PAUSE_S, SEEK_MOST_S)
        while True:
            await self._map_wanted.wait()
            self._map_wanted.clear()
            known = await self._newer_map()
            if known is not None:
                backoff = Backoff(SEEK_PAUSE_S, SEEK_MOST_S)
                self._take_map(known)
            else:
                await asyncio.sleep(backoff.pause_s())
            for conversation in self._all():
                if conversation.is_paused:
                    conversation.resume()
            if self._is_map_doubtful:
                self._map_wanted.set()

    @property
    def _is_map_doubtful(self) -> bool:
        return self._reports.has_vacant or not all(each.is_connected for each, _ in self._owners.values())

    async def _newer_map(self) -> RangeMap | None:
        """Return a map that replaces the known one, if any connected master has one."""
        known, informant = self._reports.map, self._informant
        request = MastersRequest.newer_than(known)
        for conversation in sorted(self._all(), key=lambda each: each is not informant):
            try:
                newer = await conversation.newer_map(request)
            except (TanghuluError, TimeoutError):
                continue
            if newer is not None and newer.version and newer.replaces(known):
                return newer
        return None

    def _take_map(self, known: RangeMap) -> None:
        """Use the map ``known``: converse with the owners that it names, and with no others."""
        self._state.take_map(known)
        outboxes = self._reports.owners
        _log.info("reporter.map", version=known.version, owners=len(outboxes))
        for owner in [each for each in self._owners if self._owners[each][0].outbox is not outboxes.get(each)]:
            conversation, task = self._owners.pop(owner)
            task.cancel()
            if self._informant is conversation:
                self._informant = None
        for owner in [each for each in outboxes if each not in self._owners]:
            conversation = self._conversation(owner)
            self._owners[owner] = conversation, self._tasks.create_task(conversation.run())
        self._state.begin_reports()
        self.kick()

    # --- conversations

    def _failed(self, conversation: MasterConversation, error: TanghuluError) -> None:
        """Handle a failed connection, or a master that owns other ranges than the map states."""
        if isinstance(error, KeysMoved):
            self._request_map_of(conversation)
            return
        self.connected.clear()
        if conversation.owner is not None:
            self._map_wanted.set()
        elif isinstance(error, LeaseExpired):
            self._on_unregistered()
        elif conversation.master is not None:
            self._masters.failed(conversation.master, error)

    def _request_map_of(self, conversation: MasterConversation) -> None:
        self._informant = conversation
        self._map_wanted.set()

    def _announcement(self, conversation: MasterConversation, message: ReportMessage) -> NodeAnnouncement:
        """Return ``message`` for the owner of everything or of some ranges, or the leader; with node figures."""
        known, outbox, piece = self._reports.map, conversation.outbox, message.piece
        term = self._state.newest_term
        if known is not None:
            term = Term(max(map(known.term_of, outbox.ranges), default=0), known.cluster)
        reported = [] if piece is None else piece.chunks
        is_busy = self._state.has_writers or message.added or outbox.waits_for_master or not outbox.empty
        chunks, tier = self._chunks, self._chunks.tier
        return NodeAnnouncement(
            self._instance_id,
            self._generation,
            [ChunkEntry(*_entry(chunk), self._reports.is_unconfirmed(chunk)) for chunk in message.added],
            message.removed,
            message.deleted,
            message.retracted,
            message.report_id,
            None if piece is None else ReportPiece(piece.number, piece.next_slot, list(map(_entry, reported))),
            None if known is None or not message.ranges else message.ranges,
            capacity_bytes=chunks.capacity_bytes,
            used_bytes=chunks.used_bytes,
            ssd_capacity_bytes=tier.capacity_bytes,
            ssd_used_bytes=tier.used_bytes,
            replicated=[(each.key, each.replicas) for each in chain(message.added, reported) if each.replicas > 1],
            quiet=self._state.draining and not is_busy,
            hot=message.hot,
            failed_copies=message.failed_copies,
            tenants=self._bounded_tenants(conversation),
            map_version=0 if known is None else known.version,
            owned=0 if known is None else bits_of(outbox.ranges),
            term=term,
        )

    def _bounded_tenants(self, conversation: MasterConversation) -> dict[str, int] | None:
        """Return once a second, for the leader, the bytes here of the tenants with a quota for all nodes."""
        tenants = self._chunks.tenants
        if conversation.owner is not None or tenants is None:
            return None
        if conversation.sent_s < self._tenants_sent_s + HEARTBEAT_S:
            return None
        self._tenants_sent_s = conversation.sent_s
        return dict(tenants.bounded())

    def _replied(self, conversation: MasterConversation, message: ReportMessage, reply: AnnounceReply) -> None:
        """Take the parts of an answer that concern the whole node."""
        if reply.num_nodes and self._chunks.tenants is not None:
            self._chunks.tenants.update_elsewhere(dict(reply.elsewhere or {}), reply.num_nodes)
        if not self.connected.is_set() and not self._reports.is_reporting and not self._reports.has_vacant:
            self.connected.set()
            _log.info("reporter.connected", master=str(conversation.master))
        self._report_wanted(conversation, message, reply)
        if message.added:  # the puts' clients are answered first
            asyncio.get_running_loop().call_soon(self._on_change)
        if reply.orders is not None:
            self._on_orders(reply.orders)

    def _report_wanted(self, conversation: MasterConversation, message: ReportMessage, reply: AnnounceReply) -> None:
        """Begin the reports requested by the master, and request the map if the master uses another."""
        known, outbox = self._reports.map, conversation.outbox
        if known is not None and reply.map_version > known.version:
            self._request_map_of(conversation)
        if reply.report_wanted and message.report_id:
            outbox.want_whole_report()
        outbox.want_report([each.number for each in reply.ranges if each.wanted])
        if outbox.report_wanted:
            _log.info("reporter.report", master=str(conversation.master), num_chunks=len(self._chunks))
            self._state.begin_reports()


def _entry(chunk: Holding) -> tuple[ChunkKey, int, int, bool]:
    return chunk.key, chunk.version, chunk.size_bytes, chunk.tier is Tier.SSD
