"""One master told of what a node holds: the connection, and one message under way on it at a time.

A conversation with the owner of some ranges of keys tells it of those; the one with the leader tells everything while
no map of the masters is known, and later only that the node lives. What the answers mean for the node as a whole is the
``Reporting``'s, which is the reporter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Protocol

import structlog

from tanghulu.auth.certificate_roles import MASTER
from tanghulu.discovery.masters import SEEK_PAUSE_S
from tanghulu.errors import KeysMoved, MasterUnavailable, NotLeader, TanghuluError
from tanghulu.masters import Masters
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.greeting import greet
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.report_queue import ReportMessage, ReportQueue
from tanghulu.store.node.state.slot_report import SlotPiece
from tanghulu.store.protocol.announcements import AnnounceReply, ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_RANGES, RANGE_SLOTS, bits_of, known_below
from tanghulu.store.protocol.messages import MastersRequest, ProveReply, ProveRequest
from tanghulu.store.protocol.methods import ANNOUNCE, MASTERS, PROVE
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import LeaseProofs, Renewals, Term
from tanghulu.store.protocol.types import Tier
from tanghulu.types import Address, InstanceId

_log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5)
#: Between two messages of a node that waits until it may report, or until the master knows more slots.
_POLL_S = 0.2


class Reporting(Protocol):
    """What a conversation leaves to the reporter."""

    @property
    def instance_id(self) -> InstanceId:
        """The node's id."""

    @property
    def generation(self) -> int:
        """Of the node's process."""

    def with_news(self, request: NodeAnnouncement, conversation: MasterConversation) -> NodeAnnouncement:
        """The message with what is not the queue's."""

    def answered(self, conversation: MasterConversation, message: ReportMessage, reply: AnnounceReply) -> None:
        """A master has answered; the queue knows."""

    def failed(self, conversation: MasterConversation, error: TanghuluError) -> None:
        """A connection failed."""

    def moved(self, conversation: MasterConversation) -> None:
        """The master there owns other ranges than the map says; nothing is told it before ``resume``."""


class MasterConversation:
    """See the module. ``find`` tells where to connect; ``owner`` None: it is the leader that is talked with."""

    def __init__(
        self,
        state: NodeState,
        queue: ReportQueue,
        owner: Address | None,
        find: Callable[[], Awaitable[Address]],
        masters: Masters,
        call_deadline_s: float,
        reporting: Reporting,
    ) -> None:
        self._state, self.queue, self.owner = state, queue, owner
        self._find = find
        self._masters = masters
        self._call_deadline_s = call_deadline_s
        self._reporting = reporting
        self.master = owner  # that is connected, or was last
        self.failed_copies: list[str] = []
        self.hot: list[tuple[str, int]] = []
        self.sent_s = 0.0
        self._proofs = LeaseProofs()
        self._connection: AsyncFastConnection | None = None
        self._broken: asyncio.Future[None] | None = None
        self._free = False  # connected, and no message under way
        self._is_paused = False  # until the map is known by which to go on
        self._is_closed = False
        self._message = ReportMessage()
        self._failures = 0

    # --- what the reporter asks

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open."""
        return self._connection is not None and not self._connection.closed

    @property
    def is_paused(self) -> bool:
        """Whether the master there has refused what is told it."""
        return self._is_paused

    def kick(self) -> None:
        """Send what there is to tell now, unless a message is under way."""
        if self._free and not self._is_paused and self.queue.urgent:
            self._tell()

    def resume(self) -> None:
        """Go on: another map is known, or it is time to try again."""
        self._is_paused = False
        self.kick()

    def tick(self, now_s: float) -> None:
        """Signs of life, removals alone, a master that is silent."""
        connection, queue = self._connection, self.queue
        if self._free:
            assert connection is not None
            pause_s = _POLL_S if queue.waits_for_master else HEARTBEAT_S
            if self._is_paused and not connection.closed:
                return
            if connection.closed or not queue.empty or now_s >= self.sent_s + pause_s:
                self._tell()
        elif connection is not None and now_s >= self.sent_s + self._call_deadline_s:
            connection.abort()

    async def ask_for_map(self, request: MastersRequest) -> RangeMap | None:
        """The map of the masters, if this one knows a later one; raises its typed error, or TimeoutError."""
        if self._connection is None:
            raise MasterUnavailable(f"no connection to {self.master} is open")
        async with asyncio.timeout(self._call_deadline_s):
            reply = await self._connection.call(MASTERS.number, request, MASTERS.reply)
        return reply.message.map

    # --- the connection

    async def run(self) -> None:
        """Tell the master what the queue has until cancelled."""
        try:
            while True:
                try:
                    await self._converse()
                except TanghuluError as error:
                    await self._failed(error)
        finally:
            self._is_closed = True
            await self._disconnect()

    async def _converse(self) -> None:
        """Be connected until that fails."""
        self.master = await self._find()
        shown = self._masters.credentials_for(self.master)
        self._connection = await AsyncFastConnection.connect(self.master, shortcut=True, tls=shown.tls.to(MASTER))
        await greet(self._connection, shown, self._call_deadline_s)
        self._broken = asyncio.get_running_loop().create_future()
        self._tell()
        await self._broken

    async def _failed(self, error: TanghuluError) -> None:
        if self._failures == 0:
            _log.warning("reporter.failed", master=str(self.master), code=error.code, error=error.message)
        await self._disconnect()
        self._reporting.failed(self, error)
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
        self._free = self._is_paused = False
        self._state.drain_buffers()  # so that this message names what clients have written before it
        self._message = message = self.queue.take()
        self.sent_s = asyncio.get_running_loop().time()
        request = self._reporting.with_news(self._announcement(message), self)
        try:
            self._connection.send(ANNOUNCE.number, request, ANNOUNCE.reply, self._replied)
        except TanghuluError as error:
            self._replied(error)

    def _announcement(self, message: ReportMessage) -> NodeAnnouncement:
        """What the queue has to tell, and as whom the node takes this master.

        That is as the owner of everything, of some ranges, or as the leader.
        """
        known, numbers, piece = self._state.reports.map, self.queue.ranges, message.piece
        newest = (
            self._state.newest_term
            if known is None
            else Term(max(map(known.term_of, numbers), default=0), known.cluster)
        )
        reported = [] if piece is None else piece.chunks
        return NodeAnnouncement(
            self._reporting.instance_id,
            self._reporting.generation,
            [
                ChunkEntry(chunk.key, chunk.version, chunk.size_bytes, chunk.tier is Tier.SSD, unconfirmed)
                for chunk, unconfirmed in zip(message.added, message.unconfirmed, strict=True)
            ],
            message.removed,
            message.deleted,
            message.retracted,
            message.report_id,
            None if piece is None else _report_piece(piece),
            None if known is None or not message.ranges else message.ranges,
            replicated=[(each.key, each.replicas) for each in chain(message.added, reported) if each.replicas > 1],
            map_version=0 if known is None else known.version,
            owned=0 if known is None else bits_of(numbers),
            term=newest.number,
            term_of=newest.cluster,
        )

    def _replied(self, outcome: Reply[AnnounceReply] | TanghuluError) -> None:
        message = self._message
        if self._is_closed:
            return
        if isinstance(outcome, KeysMoved):
            self._refused()
            return
        if not isinstance(outcome, TanghuluError) and len(outcome.message.accepted) != len(message.added):
            outcome = MasterUnavailable(f"{self.master} did not answer all of {len(message.added)} announcements")
        elif not isinstance(outcome, TanghuluError) and not self._obeys(outcome.message):
            outcome = NotLeader.naming("")
        if isinstance(outcome, TanghuluError):
            self._break(outcome)
            return
        reply = outcome.message
        self._proofs.answered(reply.term, reply.term_of, reply.renewals, self.sent_s)
        if reply.renewals and not self._is_proven(reply):
            self._ask_for_proof(reply)
        else:
            self._take(reply)

    def _refused(self) -> None:
        """Tell nothing more here until it is known who owns what."""
        self.queue.requeue()
        self._free = self._is_paused = True
        self._reporting.moved(self)

    def _obeys(self, reply: AnnounceReply) -> bool:
        """Whether the master knows the terms of what it answered for; an old leader's is over."""
        known = self._state.reports.map
        if known is None:
            return self._state.obeys(reply.term, reply.term_of)
        newest = max(map(known.term_of, self.queue.ranges), default=0)
        return reply.term_of == known.cluster and (self.owner is None or newest <= reply.term)

    def _is_proven(self, reply: AnnounceReply) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._proofs.is_proven(Term(reply.term, reply.term_of), now_s)

    def _ask_for_proof(self, reply: AnnounceReply) -> None:
        """Have the master prove that it leads, or owns, before ``reply`` counts; no other message leaves meanwhile."""
        assert self._connection is not None
        sent_s = asyncio.get_running_loop().time()

        def proved(proof: Reply[ProveReply] | TanghuluError) -> None:
            if self._is_closed:
                return
            if not isinstance(proof, TanghuluError):
                told = proof.message
                renewals = Renewals(told.asked_before, Renewals.of(told.renewals).confirmed)
                self._proofs.told(Term(told.term, told.term_of), sent_s, renewals, told.ttl_ms / 1000)
                if self._is_proven(reply):
                    self._take(reply)
                    return
                proof = NotLeader.naming("")
            self._break(proof)

        try:
            self._connection.send(PROVE.number, ProveRequest(), PROVE.reply, proved)
        except TanghuluError as error:
            self._break(error)

    def _take(self, reply: AnnounceReply) -> None:
        self._free = True
        self._failures = 0
        message, queue = self._message, self.queue
        queue.done()
        queue.granted(reply.report_keys, self._known(reply))
        self._decided(message, reply)
        self._reporting.answered(self, message, reply)
        self.kick()

    def _known(self, reply: AnnounceReply) -> bytes:
        if self._state.reports.map is None:
            return known_below(reply.known_slots)
        known = bytearray([RANGE_SLOTS] * NUM_RANGES)
        for number, known_slots, _ in reply.ranges:
            known[number] = known_slots
        return bytes(known)

    def _decided(self, message: ReportMessage, reply: AnnounceReply) -> None:
        """Take the master's decisions on chunks."""
        undecided = set(reply.undecided)
        for index, (chunk, stands) in enumerate(zip(message.added, reply.accepted, strict=True)):
            if not message.concerns(chunk.key):
                continue
            if index in undecided:
                self.queue.again(chunk)
            else:
                self._state.reported(chunk, accepted=stands)
        for index in reply.refused:
            if message.piece is not None and index < len(message.piece.chunks):
                chunk = message.piece.chunks[index]
                if message.concerns(chunk.key):
                    self._state.reported(chunk, accepted=False)

    def _break(self, error: TanghuluError) -> None:
        self.queue.requeue()
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def __repr__(self) -> str:
        return f"MasterConversation({self.owner or 'the leader'}, {self.queue!r})"


def _report_piece(piece: SlotPiece) -> ReportPiece:
    entries = [(each.key, each.version, each.size_bytes, each.tier is Tier.SSD) for each in piece.chunks]
    return ReportPiece(piece.number, piece.next_slot, entries)
