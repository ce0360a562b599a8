"""The calls of the directory: one implementation behind the fast lane and behind gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc.aio
import structlog

from tanghulu.auth.certificate_roles import NODE, require_role
from tanghulu.errors import NodeUnavailable, NotLeader, StoreFull, TanghuluError
from tanghulu.protos import directory_pb2 as pb
from tanghulu.protos import directory_pb2_grpc
from tanghulu.rpc.fast_server import FastService, Peer
from tanghulu.rpc.greeting import welcome
from tanghulu.rpc.grpc_edge import abort
from tanghulu.rpc.methods import HELLO, Method
from tanghulu.store.master.directory.announcement import NodeAnnouncement
from tanghulu.store.master.directory.chunk_table import FoundChunk
from tanghulu.store.master.ownership import ALL_RANGES
from tanghulu.store.master.rpc import wire
from tanghulu.store.master.rpc.followers import follow
from tanghulu.store.master.rpc.forwarding import Forwarding
from tanghulu.store.master.rpc.node_list import NodeList
from tanghulu.store.master.rpc.waiting import WaitCalls
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.key_slots import RANGE_SLOTS, bits_of, range_of
from tanghulu.store.protocol.messages import (
    CommitKeyReply,
    CommitKeysReply,
    CommitKeysRequest,
    LocateReply,
    LocateRequest,
    Location,
    MastersReply,
    MastersRequest,
    ProveReply,
    ProveRequest,
)
from tanghulu.store.protocol.types import ClientCommit, CommitResult
from tanghulu.types import format_size

_log = structlog.get_logger(__name__)
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
#: Keys of a listing that are looked up in one step, some 8 ms.
LIST_STEP_KEYS = 1000


class _Termed(Protocol):
    """A reply that carries the term of the master, and the renewals of its lease."""

    term: int
    term_of: int
    renewals: int


Q = TypeVar("Q")
R = TypeVar("R", bound=_Termed)


class DirectoryCalls:
    """The unary calls: message in, message out, typed errors raised. None waits, but those of gRPC for other masters.

    Without ``forwarding`` callers of gRPC, too, are refused what this master does not own.
    """

    def __init__(self, server: MasterServer, forwarding: Forwarding | None = None) -> None:
        self._server = server
        self.forwarding = forwarding
        self._master = server.master
        self._metrics = server.metrics
        self.waiting = WaitCalls(server)
        self.node_list = NodeList(server)

    def announce(self, request: pb.AnnounceRequest) -> pb.AnnounceReply:
        """Take what a node says. Raises NotLeader, or KeysMoved if it says anything of keys that are not owned here."""
        announcement = wire.announcement_from_wire(request)
        self._require_announced(request, announcement)
        answer = self._master.announce(announcement, self._server.now_s)
        self._server.changed()
        if len(self.waiting.board):
            added = zip(announcement.added, answer.accepted, strict=True)
            self.waiting.announced(entry.key for entry, stands in added if stands)
            if announcement.piece is not None:
                self.waiting.announced(entry[0] for entry in announcement.piece.entries)
        counts = self._metrics.counts
        num_accepted = answer.accepted.count(True)
        counts.announcements += 1
        counts.accepted += num_accepted
        counts.refused += len(answer.accepted) - num_accepted - len(answer.undecided) + len(answer.refused)
        if announcement.piece is not None:
            counts.report_pieces += 1
            counts.reported += len(announcement.piece.entries) - len(answer.refused)
        counts.removed += len(announcement.removed) + len(announcement.deleted)
        counts.retracted = self._master.directory.num_retracted
        reply = pb.AnnounceReply(
            accepted=answer.accepted,
            report_wanted=answer.report_wanted,
            undecided=answer.undecided,
            refused=answer.refused,
            report_keys=answer.report_keys,
            known_slots=self._master.directory.known_prefix,
        )
        if request.map_version:
            self._tell_of_ranges(request.owned, answer.untold, reply)
        orders = self._master.orders_for(announcement, self._server.now_s)
        if orders is not None:
            wire.add_orders(reply, *orders, self._master.directory.instance)
        if request.tenants:
            self._tell_of_tenants(request, reply)
        return self.signed(reply)

    def _require_announced(self, request: pb.AnnounceRequest, announcement: NodeAnnouncement) -> None:
        """Raise what a node has to hear that takes this master for the owner of other ranges, or for the leader."""
        server = self._server
        if not server.ownership.shares:
            return
        if not request.map_version:
            server.require_newest(request.term, request.term_of)
            server.require_ranges(0)
        elif not request.owned:
            server.require_leadership()
        else:
            server.require_newest(request.term, request.term_of)
            self._require_owned_since(request)
            server.require_owned(wire.named_keys(announcement))

    def _require_owned_since(self, request: pb.AnnounceRequest) -> None:
        """Raise KeysMoved if a range has come back to this master in a later term than the node knows.

        Until it goes by that term, the node takes clients' commits of the term before for valid.
        """
        known = self._server.ownership.map
        owned = [number for number in self._server.ownership.owned if request.owned >> number & 1]
        if known.cluster == request.term_of and any(known.term_of(number) > request.term for number in owned):
            raise self._server.ownership.refusal()

    def _tell_of_ranges(self, owned: int, untold: Sequence[int], reply: pb.AnnounceReply) -> None:
        """How much is known of the ranges here, to a node that takes ``owned`` for this master's."""
        ownership, known = self._server.ownership, self._master.directory.known_slots()
        for number in sorted({*known, *untold}):
            known_slots = known.get(number, RANGE_SLOTS)
            reply.ranges.add(number=number, known_slots=known_slots, wanted=number in untold)
        if owned and owned != bits_of(ownership.owned):
            reply.map_version = ownership.map.version

    def _tell_of_tenants(self, request: pb.AnnounceRequest, reply: pb.AnnounceReply) -> None:
        totals, directory = self._master.tenants, self._master.directory
        totals.told(request.node_id, {each.tenant: each.num_bytes for each in request.tenants})
        for tenant, num_bytes in totals.elsewhere(request.node_id, directory.candidates()).items():
            reply.elsewhere.add(tenant=tenant, num_bytes=num_bytes)
        reply.num_nodes = directory.num_nodes

    def _announce_on(self, peer: Peer, request: pb.AnnounceRequest, attachment: memoryview) -> pb.AnnounceReply:
        """``announce`` of a node whose connection tells of its end."""
        require_role(peer.roles, NODE, "to announce chunks")
        reply = self.announce(request)
        if peer.state is None:
            peer.state = node_id = request.node_id
            self._master.connection_made(node_id, self._server.now_s)
            peer.on_close.append(lambda: self._master.connection_lost(node_id, self._server.now_s))
        return reply

    def through(self, keys: Sequence[str] | None = None) -> Forwarding | None:
        """What asks the owners of ``keys``, or of all, for a caller of gRPC; None if this master is the only one.

        Raises NotLeader if another master is to be asked.
        """
        if self.forwarding is None:
            return None
        server = self._server
        if server.ownership.owned == ALL_RANGES or (keys is not None and server.owns(keys)):
            return None
        server.require_leadership()
        return self.forwarding

    def _commit_key(self, peer: Peer, said: ClientCommit, attachment: memoryview) -> CommitKeyReply:
        """Take a client's word for a chunk that it has written into a write buffer."""
        self._server.require_newest(said.term, said.term_of)
        self._server.require_owned((said.key,))
        result = self._master.directory.commit_by_client(said, self._server.now_s)
        counts = self._metrics.counts
        if result is CommitResult.ACCEPTED:
            self._server.changed()
            if len(self.waiting.board):
                self.waiting.announced((said.key,))
            counts.client_commits += 1
        elif result is CommitResult.EXISTS:
            counts.refused += 1
        return CommitKeyReply(result, *self._server.signature)

    def _commit_keys(self, peer: Peer, request: CommitKeysRequest, attachment: memoryview) -> CommitKeysReply:
        """The same of several values of one put."""
        said = request.said
        wire.check_count(len(said))
        newest = max(each.term for each in said)
        self._server.require_newest(newest, said[0].term_of)  # one client says all of it
        self._server.require_owned([each.key for each in said])
        directory, now_s, counts = self._master.directory, self._server.now_s, self._metrics.counts
        results = [directory.commit_by_client(each, now_s) for each in said]
        accepted = [each.key for each, result in zip(said, results, strict=True) if result is CommitResult.ACCEPTED]
        if accepted:
            self._server.changed()
            if len(self.waiting.board):
                self.waiting.announced(accepted)
        counts.client_commits += len(accepted)
        counts.refused += results.count(CommitResult.EXISTS)
        return CommitKeysReply(results, *self._server.signature)

    def holds(self, keys: Sequence[str]) -> bytes:
        """For each key 1 if somebody holds it, else 0."""
        wire.check_count(len(keys))
        held = self._master.directory.holds(keys)
        self._count(len(keys), held.count(0))
        return held

    def holders(self, keys: Sequence[str], *, removing: bool) -> list[FoundChunk | None]:
        """Who holds these keys; ``removing``: see LocateRequest."""
        wire.check_count(len(keys))
        directory = self._master.directory
        found = directory.locate_to_remove(keys) if removing else directory.locate(keys)
        self._count(len(keys), found.count(None))
        return found

    def _count(self, num_keys: int, num_missing: int) -> None:
        counts = self._metrics.counts
        counts.missing += num_missing
        counts.found += num_keys - num_missing

    async def locate(self, request: pb.LocateRequest) -> pb.LocateReply:
        """Answer LOCATE of gRPC: who holds these keys, or only whether somebody does. Raises NotLeader."""
        forwarding = self.through(request.keys)
        if forwarding is not None:
            asked = LocateRequest(list(request.keys), request.count_only, request.removing)
            return wire.located_to_wire(await forwarding.locate(asked))
        self._server.require_owned(request.keys)
        if request.count_only:
            held = self.holds(request.keys)
            return pb.LocateReply(found=held, incomplete=self._master.directory.is_incomplete(request.keys, held))
        found = self.holders(request.keys, removing=request.removing)
        return wire.locate_to_wire(found, incomplete=self._master.directory.is_incomplete(request.keys, found))

    def _locate(self, peer: Peer, request: LocateRequest, attachment: memoryview) -> LocateReply:
        self._server.require_owned(request.keys)
        if request.count_only:
            held = self.holds(request.keys)
            incomplete = self._master.directory.is_incomplete(request.keys, held)
            return LocateReply(incomplete, (), held, *self._server.signature)
        found = self.holders(request.keys, removing=request.removing)
        incomplete = self._master.directory.is_incomplete(request.keys, found)
        locations = [None if each is None else Location(*each) for each in found]
        return LocateReply(incomplete, locations, b"", *self._server.signature)

    def place(self, request: pb.PlaceRequest) -> pb.PlaceReply:
        """Where to put a new chunk. Raises NodeUnavailable without nodes, StoreFull if none can hold it."""
        directory = self._master.directory
        nodes = directory.place(wire.placement_from_wire(request), self._server.rng)
        if not nodes and not directory.num_nodes:
            raise NodeUnavailable("no store node is registered at this master; start one with `tanghulu node`")
        if not nodes:
            raise StoreFull(
                f"none of {directory.num_nodes} nodes takes a chunk of {format_size(request.size_bytes)}: "
                "they are draining, smaller, or have not announced their capacity yet"
            )
        self._metrics.counts.placements += 1
        return pb.PlaceReply(nodes=wire.nodes_to_wire(nodes, self._server.now_s))

    async def nodes(self, request: pb.NodesRequest) -> pb.NodesReply:
        """Answer NODES of gRPC: all nodes, and how the directory stands; see ``NodeList``.

        The owners are asked for the figures of now; callers that name a version want the nodes alone.
        """
        reply = pb.NodesReply.FromString(self._node_list(request))
        forwarding = None if request.ranges or request.versioned else self.through()
        if forwarding is not None:
            of_all = await forwarding.nodes()
            del reply.nodes[:]
            reply.nodes.extend(of_all.nodes)
            reply.num_keys, reply.rebuilding, reply.of_part = of_all.num_keys, of_all.rebuilding, False
        return reply

    def _node_list(self, request: pb.NodesRequest) -> bytes:
        if request.ranges:
            self._server.require_ranges(request.ranges)
        else:
            self._server.require_leadership()
        return self.node_list.answer(request)

    async def list_keys_of_all(self, request: pb.ListKeysRequest) -> pb.ListKeysReply:
        """Answer LIST_KEYS of gRPC: ``list_keys``, of all owners."""
        forwarding = None if request.ranges else self.through()
        return await (self.list_keys(request) if forwarding is None else self._signed(forwarding.list_keys(request)))

    async def list_keys(self, request: pb.ListKeysRequest) -> pb.ListKeysReply:
        """A page of keys, in order, made in steps; other calls have their turn in between.

        Raises NotLeader, or KeysMoved.
        """
        reply, num_left, after = pb.ListKeysReply(more=True), wire.list_limit(request), request.after
        ranges = request.ranges
        self.signed(reply)  # a range that goes and comes back between two steps has a later term than this says
        while reply.more and num_left:
            self._server.require_ranges(ranges)
            page = self._master.directory.list_keys(request.prefix, after, min(num_left, LIST_STEP_KEYS))
            wanted = [each for each in page.keys if ranges >> range_of(each.key) & 1] if ranges else page.keys
            reply.keys.extend(map(wire.listed_to_wire, wanted))
            reply.more = page.more
            num_left -= len(wanted)
            after = page.keys[-1].key if page.walked_to is None and page.keys else page.walked_to or ""
            await asyncio.sleep(0)
        return reply

    async def replicate_at_all(self, request: pb.ReplicateRequest) -> pb.ReplicateReply:
        """Answer REPLICATE of gRPC: ``replicate``, at all owners."""
        forwarding = self.through(request.keys)
        return self.replicate(request) if forwarding is None else await self._signed(forwarding.replicate(request))

    def replicate(self, request: pb.ReplicateRequest) -> pb.ReplicateReply:
        """Have chunks copied ahead. Raises InvalidRequest for a number or a time that makes no sense."""
        wire.check_count(len(request.keys))
        self._server.require_owned(request.keys)
        master = self._master
        num_taken = master.copies.ask(request.keys, request.holders, request.for_s, self._server.now_s)
        return self.signed(pb.ReplicateReply(num_taken=num_taken))

    async def wait(self, request: pb.WaitRequest) -> pb.WaitReply:
        """Answer WAIT of gRPC; a caller that hangs up cancels it."""
        forwarding = self.through(request.keys)
        return await (self.waiting.wait_grpc(request) if forwarding is None else self._signed(forwarding.wait(request)))

    def _masters(self, peer: Peer, request: MastersRequest, attachment: memoryview) -> MastersReply:
        """Which master owns which range, as far as this one knows. Raises NotLeader before it has seen any map."""
        if self._server.ownership.shares and not self._server.ownership.map.version:
            raise NotLeader.naming("")
        return MastersReply.of(self._server.ownership.map, request)

    async def _prove(self, peer: Peer, request: ProveRequest, attachment: memoryview) -> ProveReply:
        """A proof that this master leads; see ``terms.LeaseProofs``."""
        leadership = self._server.leadership
        if leadership is None:
            return ProveReply()
        asked_before = await leadership.prove()
        return ProveReply(*self._server.signature, asked_before, round(leadership.ttl_s * 1000))

    async def _signed(self, call: Awaitable[R]) -> R:
        return self.signed(await call)

    def signed(self, reply: R) -> R:
        """``reply`` with this master's term and renewals."""
        reply.term, reply.term_of, reply.renewals = self._server.signature
        return reply

    def serve(self, service: FastService) -> None:
        """Answer on the fast lane too."""
        service.register(HELLO, welcome)
        service.register(methods.ANNOUNCE, self._announce_on)
        service.register(methods.LOCATE, self._locate)
        service.register(methods.COMMIT_KEY, self._commit_key)
        service.register(methods.COMMIT_KEYS, self._commit_keys)
        service.register(methods.WAIT, self.waiting.wait)
        service.register(methods.NODES, lambda peer, request, attachment: self._node_list(request))
        self._register(service, methods.PLACE, self.place)
        service.register(methods.LIST_KEYS, lambda peer, request, attachment: self.list_keys(request))
        service.register(methods.REPLICATE, lambda peer, request, attachment: self.replicate(request))
        service.register(methods.MASTERS, self._masters)
        service.register(methods.PROVE, self._prove)

    def _register(self, service: FastService, method: Method[Any, Any], call: Callable[[Any], Any]) -> None:
        def handler(peer: Peer, request: Any, attachment: memoryview) -> Any:
            return call(request)  # of the only master, whose term is 0

        def handler_of_several(peer: Peer, request: Any, attachment: memoryview) -> Any:
            self._server.require_leadership()
            return self.signed(call(request))

        service.register(method, handler if self._server.leadership is None else handler_of_several)


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """The same calls over gRPC, and the event stream."""

    def __init__(self, server: MasterServer, calls: DirectoryCalls) -> None:
        self._server = server
        self._calls = calls

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceReply:
        """See DirectoryCalls.announce."""
        return await self._answer(self._leading(self._calls.announce), request, context)

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateReply:
        """See DirectoryCalls.locate."""
        return await self._answer_later(self._calls.locate, request, context)

    async def Place(self, request: pb.PlaceRequest, context: Context) -> pb.PlaceReply:
        """See DirectoryCalls.place."""
        return await self._answer(self._leading(self._calls.place), request, context)

    async def Nodes(self, request: pb.NodesRequest, context: Context) -> pb.NodesReply:
        """See DirectoryCalls.nodes."""
        return await self._answer_later(self._calls.nodes, request, context)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysReply:
        """See DirectoryCalls.list_keys_of_all."""
        return await self._answer_later(self._calls.list_keys_of_all, request, context, signs=False)

    async def Replicate(self, request: pb.ReplicateRequest, context: Context) -> pb.ReplicateReply:
        """See DirectoryCalls.replicate_at_all."""
        return await self._answer_later(self._calls.replicate_at_all, request, context, signs=False)

    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.WaitReply:
        """See DirectoryCalls.wait."""
        return await self._answer_later(self._calls.wait, request, context, signs=False)

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.EventBatch]:
        """A snapshot or the events behind the caller's last, then changes; see followers."""
        open_streams = self._server.metrics.followers.labels("directory")
        open_streams.inc()
        try:
            forwarding = None if request.ranges else self._calls.through()
            told = follow(self._server, request) if forwarding is None else forwarding.follow(request)
            async with aclosing(told) as batches:
                async for batch in batches:
                    yield batch
        except TanghuluError as error:
            await abort(context, error)
        finally:
            open_streams.dec()

    def _leading(self, call: Callable[[Q], R]) -> Callable[[Q], R]:
        def checked(request: Q) -> R:
            self._server.require_leadership()
            return call(request)

        return checked

    async def _answer_later(
        self, call: Callable[[Q], Awaitable[R]], request: Q, context: Context, *, signs: bool = True
    ) -> R:
        """The answer of a call that may wait; ``signs``: it is not signed yet."""
        try:
            reply = await call(request)
        except TanghuluError as error:
            await abort(context, error)
            raise
        return self._calls.signed(reply) if signs else reply

    async def _answer(self, call: Callable[[Q], R], request: Q, context: Context) -> R:
        try:
            return self._calls.signed(call(request))
        except TanghuluError as error:
            await abort(context, error)
            raise
