"""Tells the masters what the node holds: what is of the whole node, around a conversation with each of them.

One message is under way to each master at a time. A put's report leaves in the same step of the event loop that kicked
it, and the master's answer reaches the put's client in the step in which it arrives; puts that come meanwhile share the
next message. Without a master its queue waits and the connection is tried again; a put's own deadline then ends its
wait, the chunk stays.

The node learns as clients do that several masters share the keys: one that does not own what it is told answers
KeysMoved, and is asked for the map. From then on each owner is told of its ranges, and the leader that the node lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog
from msgspec import structs

from tanghulu.discovery.masters import ATTEMPT_S, SEEK_MOST_S, SEEK_PAUSE_S, MasterFinder
from tanghulu.errors import LeaseExpired, MasterUnavailable, TanghuluError
from tanghulu.runtime.backoff import Backoff
from tanghulu.store.node.reporting.conversation import HEARTBEAT_S, MasterConversation
from tanghulu.store.node.state.confirmations import Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.report_queue import ReportMessage
from tanghulu.store.protocol.announcements import AnnounceReply, NodeAnnouncement, Orders
from tanghulu.store.protocol.messages import MastersRequest
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.types import Address, ChunkKey, InstanceId

_log = structlog.get_logger(__name__)

CALL_DEADLINE_S = 3.0
#: Chunks of a report that are sorted into their slots in one step, about a millisecond.
_SORTED_AT_ONCE = 2048


class Reporter:
    """``run`` stays connected, ``tick`` keeps the times; ``on_change`` is called after answers changed chunks.

    ``on_unregistered`` is called when the leader does not know this node: it is new, or another leads. ``on_orders``
    is told what a master wants copied or dropped.
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
        self._state = state
        self._tenants, self._tier, self._hot = state.chunks.tenants, state.chunks.tier, state.chunks.hot
        self._queues = state.reports
        self._masters = masters
        self._on_unregistered = on_unregistered
        self._on_orders = on_orders
        self._on_change = on_change
        self.instance_id = InstanceId("")
        self.generation = generation
        self._call_deadline_s = ATTEMPT_S if masters.several else CALL_DEADLINE_S
        self._leader = self._conversation(None, masters.find)
        self._owners: dict[Address, tuple[MasterConversation, asyncio.Task[None]]] = {}
        self._tasks = asyncio.TaskGroup()
        self._map_wanted = asyncio.Event()
        self._informant: MasterConversation | None = None  # who seems to know another map
        self._sorting: asyncio.Task[None] | None = None
        self._hot_told_s = 0.0
        self._tenants_told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.connected = asyncio.Event()

    def _conversation(self, owner: Address | None, find: Callable[[], Awaitable[Address]]) -> MasterConversation:
        queue = self._queues.leader if owner is None else self._queues.owners[owner]
        return MasterConversation(self._state, queue, owner, find, self._masters.masters, self._call_deadline_s, self)

    def _all(self) -> Iterator[MasterConversation]:
        yield self._leader
        for conversation, _ in self._owners.values():
            yield conversation

    def _with_owner_of(self, key: ChunkKey) -> MasterConversation:
        queue = self._queues.of(key)
        return next((each for each in self._all() if each.queue is queue), self._leader)

    # --- what the node's services ask

    def kick(self) -> None:
        """Send what there is to tell now, where no message is under way."""
        for conversation in self._all():
            conversation.kick()

    def copy_failed(self, key: str) -> None:
        """An ordered copy failed; the master that ordered it hears of it with the next message."""
        self._with_owner_of(ChunkKey(key)).failed_copies.append(key)

    def confirm(self, chunks: Sequence[Holding], until_s: float, done: Done) -> None:
        """Call ``done`` with the masters' word on each chunk: whether this put was the first of its key.

        MasterUnavailable comes in the place of those that were not confirmed until ``until_s`` (the loop's time);
        they stay and are reported later.
        """
        if self._queues.confirm(chunks, until_s, done):
            if self._timer is None or self._timer.when() > until_s:
                self._set_timer(until_s)
            self.kick()

    async def flushed(self, until_s: float) -> None:
        """Wait until all masters know what was removed before; raises MasterUnavailable at ``until_s``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        flush = self._queues.flush(lambda: None if future.done() else future.set_result(None))
        self.kick()
        try:
            async with asyncio.timeout_at(until_s):
                await future
        except TimeoutError:
            raise self._no_answer() from None
        finally:
            self._queues.forget_flush(flush)

    def tick(self) -> None:
        """To be called every few hundredths of a second."""
        self._queues.settle_gone()
        if self._queues.report_wanted:
            self._state.report_wanted()
        if self._queues.is_unsorted and (self._sorting is None or self._sorting.done()):
            self._sorting = asyncio.create_task(self._sort())
        now_s = asyncio.get_running_loop().time()
        for conversation in self._all():
            conversation.tick(now_s)

    # --- time

    def _set_timer(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(until_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        for chunk in self._queues.expire(asyncio.get_running_loop().time(), self._no_answer()):
            self._state.gave_up(chunk)
        if (next_s := self._queues.next_expiry_s) is not None:
            self._set_timer(next_s)
        self._on_change()

    def _no_answer(self) -> MasterUnavailable:
        masters = list(map(str, self._queues.owners)) or self._leader.master or self._masters.masters
        return MasterUnavailable(
            f"the master at {masters} did not answer this node before the deadline; "
            "what was put stays here and will be announced, what was removed is gone"
        )

    # --- the masters

    async def run(self, instance_id: InstanceId) -> None:
        """Report as ``instance_id`` until cancelled; the first message begins a full report."""
        self.instance_id = instance_id
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
        while self._queues.is_unsorted:
            self._queues.sort_report(_SORTED_AT_ONCE)
            await asyncio.sleep(0)
        self.kick()

    async def _learn_maps(self) -> None:
        """Ask for the map as long as what is known is not what the masters go by."""
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
        return self._queues.has_vacant or not all(each.is_connected for each, _ in self._owners.values())

    async def _newer_map(self) -> RangeMap | None:
        """A map that replaces the known one, if any master that is connected tells one."""
        known, informant = self._queues.map, self._informant
        request = MastersRequest() if known is None else MastersRequest(known.version, known.cluster)
        others = [each for each in self._all() if each is not informant]
        for conversation in (*([] if informant is None else [informant]), *others):
            try:
                told = await conversation.ask_for_map(request)
            except (TanghuluError, TimeoutError):
                continue
            if told is not None and told.version and told.replaces(known):
                return told
        return None

    def _take_map(self, known: RangeMap) -> None:
        """Go by ``known``: converse with the owners that it names, and with no others."""
        queues = self._queues
        self._state.take_map(known)
        _log.info("reporter.map", version=known.version, owners=len(queues.owners))
        for owner in [each for each in self._owners if self._owners[each][0].queue is not queues.owners.get(each)]:
            conversation, task = self._owners.pop(owner)
            task.cancel()
            if self._informant is conversation:
                self._informant = None
        for owner in [each for each in queues.owners if each not in self._owners]:
            conversation = self._conversation(owner, _found(owner))
            self._owners[owner] = conversation, self._tasks.create_task(conversation.run())
        if queues.report_wanted:
            self._state.report_wanted()
        self.kick()

    # --- what conversations leave to the reporter

    def failed(self, conversation: MasterConversation, error: TanghuluError) -> None:
        """A connection failed."""
        self.connected.clear()
        if conversation.owner is not None:
            self._map_wanted.set()
        elif isinstance(error, LeaseExpired):
            self._on_unregistered()
        elif conversation.master is not None:
            self._masters.failed(conversation.master, error)

    def moved(self, conversation: MasterConversation) -> None:
        """The master there owns other ranges than the map says."""
        self._informant = conversation
        self._map_wanted.set()

    def with_news(self, request: NodeAnnouncement, conversation: MasterConversation) -> NodeAnnouncement:
        """Add what is not of the queue: the node's figures, and what the copy planner wants to know.

        That is copies that failed, what is hot, and whether a drain may end.
        """
        state, queue, chunks, tier = self._state, conversation.queue, self._state.chunks, self._tier
        if conversation.sent_s >= self._hot_told_s + HEARTBEAT_S:
            self._hot_told_s = conversation.sent_s
            self._sort_hot()
        is_busy = state.has_writers or request.added or queue.waits_for_master or not queue.empty
        failed_copies, conversation.failed_copies = conversation.failed_copies, []
        hot, conversation.hot = conversation.hot, []
        return structs.replace(
            request,
            capacity_bytes=chunks.capacity_bytes,
            used_bytes=chunks.used_bytes,
            ssd_capacity_bytes=tier.capacity_bytes,
            ssd_used_bytes=tier.used_bytes,
            quiet=state.draining and not is_busy,
            hot=hot,
            failed_copies=failed_copies,
            tenants=self._bounded_tenants(conversation),
        )

    def _bounded_tenants(self, conversation: MasterConversation) -> dict[str, int] | None:
        """Once a second and for the leader: bytes here of the tenants that have a quota for all nodes."""
        if conversation.owner is not None or self._tenants is None:
            return None
        if conversation.sent_s < self._tenants_told_s + HEARTBEAT_S:
            return None
        self._tenants_told_s = conversation.sent_s
        return dict(self._tenants.bounded())

    def _sort_hot(self) -> None:
        """Have each master told of those of its keys that were read much."""
        for conversation in self._all():
            conversation.hot = []
        for key, num_gets in self._hot.take():
            self._with_owner_of(key).hot.append((key, num_gets))

    def answered(self, conversation: MasterConversation, message: ReportMessage, reply: AnnounceReply) -> None:
        """A master has answered."""
        if reply.num_nodes and self._tenants is not None:
            self._tenants.heard(dict(reply.elsewhere or {}), reply.num_nodes)
        if not self.connected.is_set() and not self._queues.is_reporting and not self._queues.has_vacant:
            self.connected.set()
            _log.info("reporter.connected", master=str(conversation.master))
        self._report_wanted(conversation, message, reply)
        if message.added:  # the puts' clients are answered first
            asyncio.get_running_loop().call_soon(self._on_change)
        if reply.orders is not None:
            self._on_orders(reply.orders)

    def _report_wanted(self, conversation: MasterConversation, message: ReportMessage, reply: AnnounceReply) -> None:
        """Report what the master wants to be told, and ask for the map if the master goes by another."""
        known, queue = self._queues.map, conversation.queue
        if known is None:
            if reply.report_wanted:
                _log.info("reporter.full_report", num_chunks=len(self._state.chunks))
                self._state.report_all()
            return
        if reply.map_version > known.version:
            self.moved(conversation)
        if reply.report_wanted and message.report_id:  # it does not know the report under way
            queue.want_whole_report()
        queue.want_report([each.number for each in reply.ranges if each.wanted])
        if queue.report_wanted:
            _log.info("reporter.report", master=str(conversation.master), num_chunks=len(self._state.chunks))
            self._state.report_wanted()


def _found(owner: Address) -> Callable[[], Awaitable[Address]]:
    async def find() -> Address:
        return owner

    return find
