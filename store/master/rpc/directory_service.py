"""The calls of the directory, and the stream of its events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from msgspec import structs

from tanghulu.auth.certificate_roles import NODE, require_role
from tanghulu.auth.places import Caller, Places
from tanghulu.errors import NodeUnavailable, NotLeader, StoreFull
from tanghulu.rpc.fast_server import MAX_CONNECTIONS, AnswerStream, FastService, Peer
from tanghulu.rpc.greeting import welcome
from tanghulu.rpc.methods import HELLO
from tanghulu.rpc.streams import send_all
from tanghulu.store.master.directory.listing import list_keys
from tanghulu.store.master.directory.placement import PlacementRequest
from tanghulu.store.master.rpc.followers import follow
from tanghulu.store.master.rpc.node_list import NodeList, view_of
from tanghulu.store.master.rpc.waiting import WaitCalls
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import AnnounceReply, CopyOrder, NodeAnnouncement, Orders
from tanghulu.store.protocol.directory_events import EventBatch, EventsRequest
from tanghulu.store.protocol.directory_messages import (
    KeyInfo,
    ListKeysReply,
    ListKeysRequest,
    NodesReply,
    NodesRequest,
    NodeView,
    PlaceReply,
    PlaceRequest,
    ReplicateReply,
    ReplicateRequest,
    check_count,
)
from tanghulu.store.protocol.key_slots import bits_of, range_of
from tanghulu.store.protocol.messages import (
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
from tanghulu.store.protocol.types import CommitResult
from tanghulu.types import Place, format_size

#: Keys of a listing looked up in one step, some 8 ms.
LIST_STEP_KEYS = 1000
DEFAULT_LIST_LIMIT = 1000
MAX_LIST_LIMIT = 10_000
#: Streams of events of one tenant; each begins with a walk over all keys.
MAX_STREAMS = 16


class DirectoryCalls:
    """The calls: message in, message out, typed errors raised. None blocks, except to wait for keys or for its turn."""

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self._master = server.master
        self._metrics = server.metrics
        self.waiting = WaitCalls(server)
        self.node_list = NodeList(server)
        self._streams = Places("streams of events", 1, MAX_STREAMS)

    def announce(self, request: NodeAnnouncement) -> AnnounceReply:
        """Take a node's announcement. Raises NotLeader, or KeysMoved if it names keys that are not owned here."""
        self._require_announced(request)
        server, directory = self._server, self._master.directory
        answer = self._master.announce(request, server.now_s)
        server.changed()
        if len(self.waiting.board):
            added = zip(request.added, answer.accepted, strict=True)
            self.waiting.announced(entry.key for entry, stands in added if stands)
            if request.piece is not None:
                self.waiting.announced(entry[0] for entry in request.piece.entries)
        self._count_announced(request, answer)
        ownership = server.ownership
        is_mistaken = request.map_version and request.owned and request.owned != bits_of(ownership.owned)
        return structs.replace(
            answer,
            map_version=ownership.map.version if is_mistaken else 0,
            orders=self._orders(request),
            elsewhere=self._elsewhere(request) if request.tenants else None,
            num_nodes=directory.num_nodes if request.tenants else 0,
            signature=ownership.signature,
        )

    def _count_announced(self, request: NodeAnnouncement, answer: AnnounceReply) -> None:
        counts = self._metrics.counts
        num_accepted = answer.accepted.count(True)
        counts.announcements += 1
        counts.accepted += num_accepted
        counts.refused += len(answer.accepted) - num_accepted - len(answer.undecided) + len(answer.refused)
        if request.piece is not None:
            counts.report_pieces += 1
            counts.reported += len(request.piece.entries) - len(answer.refused)
        counts.removed += len(request.removed) + len(request.deleted)
        counts.retracted = self._master.directory.num_retracted

    def _require_announced(self, request: NodeAnnouncement) -> None:
        """Raise the error for a node that takes this master for the owner of other ranges, or for the leader."""
        server = self._server
        if not request.map_version:
            server.require_newest(request.term)
            server.require_ranges(0)
        elif not request.owned:
            server.ownership.require_lead()
        else:
            server.require_newest(request.term)
            self._require_owned_since(request)
            server.require_owned(request.keys())

    def _require_owned_since(self, request: NodeAnnouncement) -> None:
        """Raise KeysMoved if a range has come back to this master in a later term than the node's.

        Until it uses that term, the node accepts clients' commits of the term before as valid.
        """
        ownership, term = self._server.ownership, request.term
        known, owned = ownership.map, [number for number in ownership.owned if request.owned >> number & 1]
        if known.cluster == term.cluster and any(known.term_of(number) > term.number for number in owned):
            raise ownership.refusal()

    def _orders(self, request: NodeAnnouncement) -> Orders | None:
        """Return the node's work: copies and drops; the answer names the sources of the copies."""
        orders = self._master.orders_for(request, self._server.now_s)
        if orders is None or not any(orders):
            return None
        copies, drops = orders
        sources = map(self._master.directory.instance, {copy.source for copy in copies})
        return Orders(
            [CopyOrder(copy.key, copy.version, copy.source) for copy in copies],
            drops,
            [NodeView.of(source) for source in sources if source is not None],
        )

    def _elsewhere(self, request: NodeAnnouncement) -> dict[str, int]:
        """Return the bytes that the tenants of the announcement hold on other nodes."""
        totals, directory = self._master.tenants, self._master.directory
        totals.update(request.node_id, request.tenants or {})
        return totals.elsewhere(request.node_id, directory.candidates())

    def _announce_on(self, peer: Peer, request: NodeAnnouncement, attachment: memoryview) -> AnnounceReply:
        """``announce`` for a node on a connection that reports its own end."""
        require_role(peer.roles, NODE, "to announce chunks")
        reply = self.announce(request)
        if peer.state is None:
            peer.state = node_id = request.node_id
            self._master.connection_made(node_id, self._server.now_s)
            peer.on_close.append(lambda: self._master.connection_lost(node_id, self._server.now_s))
        return reply

    def _commit_keys(self, peer: Peer, request: CommitKeysRequest, attachment: memoryview) -> CommitKeysReply:
        """Take a client's commits of chunks that it has written into a node's memory."""
        commits, server, counts = request.commits, self._server, self._metrics.counts
        check_count(len(commits))
        server.require_newest(commits[0].term if len(commits) == 1 else max(each.term for each in commits))
        server.require_owned([each.key for each in commits])
        directory, now_s = self._master.directory, server.now_s
        results = [directory.commit_by_client(each, now_s) for each in commits]
        accepted = [each.key for each, result in zip(commits, results, strict=True) if result is CommitResult.ACCEPTED]
        if accepted:
            server.changed()
            if len(self.waiting.board):
                self.waiting.announced(accepted)
        counts.client_commits += len(accepted)
        counts.refused += results.count(CommitResult.EXISTS)
        return CommitKeysReply(results, server.ownership.signature)

    def holds(self, keys: Sequence[str]) -> bytes:
        """Return for each key 1 if some node holds it, else 0."""
        check_count(len(keys))
        held = self._master.directory.holds(keys)
        self._count(len(keys), held.count(0))
        return held

    def holders(self, keys: Sequence[str], *, removing: bool) -> list[Location | None]:
        """Return the holders of these keys; ``removing``: see LocateRequest."""
        check_count(len(keys))
        directory = self._master.directory
        found = directory.locate_to_remove(keys) if removing else directory.locate(keys)
        self._count(len(keys), found.count(None))
        return found

    def _count(self, num_keys: int, num_missing: int) -> None:
        counts = self._metrics.counts
        counts.missing += num_missing
        counts.found += num_keys - num_missing

    def _locate(self, peer: Peer, request: LocateRequest, attachment: memoryview) -> LocateReply:
        self._server.require_owned(request.keys)
        if request.count_only:
            held = self.holds(request.keys)
            incomplete = self._master.directory.is_incomplete(request.keys, held)
            return LocateReply(incomplete, (), held, self._server.ownership.signature)
        found = self.holders(request.keys, removing=request.removing)
        incomplete = self._master.directory.is_incomplete(request.keys, found)
        return LocateReply(incomplete, found, b"", self._server.ownership.signature)

    def _place(self, peer: Peer, request: PlaceRequest, attachment: memoryview) -> PlaceReply:
        """Return nodes for a new chunk. Raises NodeUnavailable without nodes, StoreFull if none can hold it."""
        self._server.ownership.require_lead()
        directory = self._master.directory
        client_place = Place.parse(request.client_place) if request.client_place else None
        wanted = PlacementRequest(request.size_bytes, request.replicas, request.prefer_node, client_place)
        nodes = directory.place(wanted, self._server.rng)
        if not nodes and not directory.num_nodes:
            raise NodeUnavailable("no store node is registered at this master; start one with `tanghulu node`")
        if not nodes:
            raise StoreFull(
                f"none of {directory.num_nodes} nodes accepts a chunk of {format_size(request.size_bytes)}: "
                "each is draining, too small, or has not reported its capacity yet"
            )
        self._metrics.counts.placements += 1
        views = [view_of(directory, node, self._server.now_s) for node in nodes]
        return PlaceReply(views, self._server.ownership.signature)

    def _nodes(self, peer: Peer, request: NodesRequest, attachment: memoryview) -> NodesReply | bytes:
        if request.ranges:
            self._server.require_ranges(request.ranges)
        else:
            self._server.ownership.require_lead()
        return self.node_list.answer(request)

    async def _list_keys(self, peer: Peer, request: ListKeysRequest, attachment: memoryview) -> ListKeysReply:
        """Return a page of keys, in order, made in steps; other calls are served in between.

        Raises NotLeader, or KeysMoved.
        """
        keys, more, after, ranges = list[KeyInfo](), True, request.after, request.ranges
        limit = min(request.limit or DEFAULT_LIST_LIMIT, MAX_LIST_LIMIT)
        # Of the first step: a range that goes and comes back between two steps has a later term.
        signature = self._server.ownership.signature
        while more and len(keys) < limit:
            self._server.require_ranges(ranges)
            page = list_keys(self._master.directory, request.prefix, after, min(limit - len(keys), LIST_STEP_KEYS))
            keys += [info for info in page.keys if not ranges or ranges >> range_of(info.key) & 1]
            more = page.more
            after = page.keys[-1].key if page.walked_to is None and page.keys else page.walked_to or ""
            await asyncio.sleep(0)
        return ListKeysReply(keys, more, signature)

    def _replicate(self, peer: Peer, request: ReplicateRequest, attachment: memoryview) -> ReplicateReply:
        """Have chunks copied in advance. Raises InvalidRequest for an invalid number or time."""
        self._server.require_owned(request.keys)
        num_taken = self._master.copies.ask(request.keys, request.holders, request.for_s, self._server.now_s)
        return ReplicateReply(num_taken, self._server.ownership.signature)

    def _events(self, peer: Peer, request: EventsRequest, attachment: memoryview) -> AnswerStream:
        """Stream a snapshot or the events behind the caller's last, then changes (``followers``). Raises Overloaded."""
        caller = Caller.of(peer.identity)
        self._streams.take(caller, MAX_CONNECTIONS)
        peer.on_close.append(partial(self._streams.give_back, caller))
        beat = EventBatch(self._master.log_generation, [])
        return send_all(peer, follow(self._server, request, peer.identity), beat)

    def _masters(self, peer: Peer, request: MastersRequest, attachment: memoryview) -> MastersReply:
        """Return the owner of each range, as known here. Raises NotLeader before this master has seen any map."""
        if self._server.ownership.shares and not self._server.ownership.map.version:
            raise NotLeader.naming("")
        return MastersReply.of(self._server.ownership.map, request)

    async def _prove(self, peer: Peer, request: ProveRequest, attachment: memoryview) -> ProveReply:
        """Return a proof that this master leads; see ``terms.LeaseProofs``."""
        return await self._server.ownership.prove()

    def serve(self, service: FastService) -> None:
        """Answer on the fast lane."""
        service.register(HELLO, welcome)
        service.register(methods.ANNOUNCE, self._announce_on)
        service.register(methods.LOCATE, self._locate)
        service.register(methods.COMMIT_KEYS, self._commit_keys)
        service.register(methods.WAIT, self.waiting.wait)
        service.register(methods.NODES, self._nodes)
        service.register(methods.PLACE, self._place)
        service.register(methods.LIST_KEYS, self._list_keys)
        service.register(methods.REPLICATE, self._replicate)
        service.register(methods.MASTERS, self._masters)
        service.register(methods.PROVE, self._prove)
        service.register(methods.EVENTS, self._events)
