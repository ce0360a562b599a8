"""Reports of a node's chunks to one master: the connection, and one message in flight on it at a time.

A conversation with the owner of some ranges of keys reports those; the one with the leader reports everything while no
map of the masters is known, and later only that the node is alive. The reporter writes the messages, and takes the
parts of the answers that concern the node as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from tanghulu.auth.certificate_roles import MASTER
from tanghulu.discovery.masters import ATTEMPT_S, SEEK_PAUSE_S, MasterFinder
from tanghulu.errors import KeysMoved, MasterUnavailable, NotLeader, TanghuluError
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.greeting import greet
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outbox import MasterOutbox, ReportMessage
from tanghulu.store.protocol.announcements import AnnounceReply, NodeAnnouncement
from tanghulu.store.protocol.key_slots import NUM_RANGES, RANGE_SLOTS
from tanghulu.store.protocol.messages import MastersRequest, ProveReply, ProveRequest
from tanghulu.store.protocol.methods import ANNOUNCE, MASTERS, PROVE
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import LeaseProofs
from tanghulu.types import Address

_log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
CALL_DEADLINE_S = 3.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5)
#: Pause between two messages of a node that waits until it may report, or until the master knows more slots.
_POLL_S = 0.2


class MasterConversation:
    """See the module; ``owner`` None means the leader.

    ``on_reply`` gets every valid answer, with its message. ``on_error`` gets the end of a connection, and KeysMoved if
    the master owns other ranges than the map states; then nothing more is sent to it before ``resume``.
    """

    def __init__(
        self,
        state: NodeState,
        outbox: MasterOutbox,
        owner: Address | None,
        masters: MasterFinder,
        announce: Callable[[MasterConversation, ReportMessage], NodeAnnouncement],
        on_reply: Callable[[MasterConversation, ReportMessage, AnnounceReply], None],
        on_error: Callable[[MasterConversation, TanghuluError], None],
    ) -> None:
        self.outbox, self.owner = outbox, owner
        self.master = owner  # the connected one, or the last
        self.sent_s = 0.0
        self.is_paused = False  # until the map needed to continue is known
        self._state = state
        self._masters = masters
        self._announce, self._on_reply, self._on_error = announce, on_reply, on_error
        self._call_deadline_s = ATTEMPT_S if masters.several else CALL_DEADLINE_S
        self._proofs = LeaseProofs()
        self._connection: AsyncFastConnection | None = None
        self._broken: asyncio.Future[None] | None = None
        self._free = False  # connected, and no message in flight
        self._is_closed = False
        self._failures = 0

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open."""
        return self._connection is not None and not self._connection.closed

    def kick(self) -> None:
        """Send urgent events now, unless a message is in flight."""
        if self._free and not self.is_paused and self.outbox.urgent:
            self._send()

    def resume(self) -> None:
        """Resume: another map is known, or it is time to try again."""
        self.is_paused = False
        self.kick()

    def tick(self, now_s: float) -> None:
        """Send heartbeats and removals, and give up an unresponsive master."""
        connection = self._connection
        if self._free:
            assert connection is not None
            pause_s = _POLL_S if self.outbox.waits_for_master else HEARTBEAT_S
            if self.is_paused and not connection.closed:
                return
            if connection.closed or not self.outbox.empty or now_s >= self.sent_s + pause_s:
                self._send()
        elif connection is not None and now_s >= self.sent_s + self._call_deadline_s:
            connection.abort()

    async def newer_map(self, request: MastersRequest) -> RangeMap | None:
        """Return the master's map if it knows a later one; raises its typed error, or TimeoutError."""
        if self._connection is None:
            raise MasterUnavailable(f"no connection to {self.master} is open")
        async with asyncio.timeout(self._call_deadline_s):
            reply = await self._connection.call(MASTERS.number, request, MASTERS.reply)
        return reply.message.map

    # --- the connection

    async def run(self) -> None:
        """Send the master the contents of the outbox until cancelled."""
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
        """Stay connected until that fails."""
        self.master = self.owner or await self._masters.find()
        shown = self._masters.masters.credentials_for(self.master)
        self._connection = await AsyncFastConnection.connect(self.master, shortcut=True, tls=shown.tls.to(MASTER))
        self.sent_s = asyncio.get_running_loop().time()
        await greet(self._connection, shown, self._call_deadline_s)
        self._broken = asyncio.get_running_loop().create_future()
        self._send()
        await self._broken

    async def _failed(self, error: TanghuluError) -> None:
        if self._failures == 0:
            _log.warning("reporter.failed", master=str(self.master), code=error.code, error=error.message)
        await self._disconnect()
        self._on_error(self, error)
        pause_s = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
        await asyncio.sleep(min(pause_s, SEEK_PAUSE_S) if self._masters.several else pause_s)
        self._failures += 1

    async def _disconnect(self) -> None:
        connection, self._connection, self._free = self._connection, None, False
        if connection is not None:
            await connection.close()

    # --- messages

    def _send(self) -> None:
        assert self._connection is not None
        self._free = self.is_paused = False
        message = self._state.next_message(self.outbox)
        self.sent_s = asyncio.get_running_loop().time()
        request, replied = self._announce(self, message), partial(self._replied, message)
        try:
            self._connection.send(ANNOUNCE.number, request, ANNOUNCE.reply, replied)
        except TanghuluError as error:
            replied(error)

    def _replied(self, message: ReportMessage, outcome: Reply[AnnounceReply] | TanghuluError) -> None:
        if self._is_closed:
            return
        if isinstance(outcome, KeysMoved):
            self.outbox.requeue()
            self._free = self.is_paused = True
            self._on_error(self, outcome)
        elif isinstance(outcome, TanghuluError):
            self._break(outcome)
        elif len(outcome.message.accepted) != len(message.added):
            self._break(MasterUnavailable(f"{self.master} did not answer all of {len(message.added)} announcements"))
        elif not self._obeys(outcome.message):
            self._break(NotLeader.naming(""))
        else:
            self._take_proven(message, outcome.message)

    def _obeys(self, reply: AnnounceReply) -> bool:
        """Return whether the master knows the terms of its ranges; an old leader's have ended."""
        known = self._state.reports.map
        if known is None:
            return self._state.admits(reply.signature.term)
        newest = max(map(known.term_of, self.outbox.ranges), default=0)
        term = reply.signature.term
        return term.cluster == known.cluster and (self.owner is None or newest <= term.number)

    def _take_proven(self, message: ReportMessage, reply: AnnounceReply) -> None:
        """Take ``reply`` once the master has proven that it leads, or owns; no other message is sent meanwhile."""
        assert self._connection is not None
        proofs, time_s = self._proofs, asyncio.get_running_loop().time
        proofs.answered(reply.signature, self.sent_s)
        if proofs.accepts(reply.signature, time_s()):
            self._take(message, reply)
            return
        sent_s = time_s()

        def proved(proof: Reply[ProveReply] | TanghuluError) -> None:
            if self._is_closed:
                return
            if isinstance(proof, TanghuluError):
                self._break(proof)
                return
            shown = proof.message
            proofs.record(shown.signature.term, sent_s, shown.renewals, shown.ttl_ms / 1000)
            if proofs.accepts(reply.signature, time_s()):
                self._take(message, reply)
            else:
                self._break(NotLeader.naming(""))

        try:
            self._connection.send(PROVE.number, ProveRequest(), PROVE.reply, proved)
        except TanghuluError as error:
            self._break(error)

    def _take(self, message: ReportMessage, reply: AnnounceReply) -> None:
        self._free = True
        self._failures = 0
        self.outbox.done()
        self.outbox.granted(reply.report_keys, self._known(reply))
        self._take_decisions(message, reply)
        self._on_reply(self, message, reply)
        self.kick()

    def _known(self, reply: AnnounceReply) -> bytes:
        """Return the number of slots of each range known to the master."""
        known = bytearray([RANGE_SLOTS] * NUM_RANGES)
        for number, known_slots, _ in reply.ranges:
            known[number] = known_slots
        return bytes(known)

    def _take_decisions(self, message: ReportMessage, reply: AnnounceReply) -> None:
        """Take the master's decisions on chunks."""
        undecided = set(reply.undecided)
        for index, (chunk, stands) in enumerate(zip(message.added, reply.accepted, strict=True)):
            if not message.concerns(chunk.key):
                continue
            if index in undecided:
                self.outbox.again(chunk)
            else:
                self._state.reported(chunk, accepted=stands)
        reported = [] if message.piece is None else message.piece.chunks
        for index in reply.refused:
            if index < len(reported) and message.concerns(reported[index].key):
                self._state.reported(reported[index], accepted=False)

    def _break(self, error: TanghuluError) -> None:
        self.outbox.requeue()
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def __repr__(self) -> str:
        return f"MasterConversation({self.owner or 'the leader'}, {self.outbox!r})"
