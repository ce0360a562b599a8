"""The masters known to a client: which one to call for which keys, and how to join the answers of several. Pure.

While a client knows one master only, it calls that one for everything, and needs none of this. A master that does not
own all keys of a call does nothing and answers KeysMoved; then the client requests the map of the masters, and from
then on splits its calls by owner:

    call                 split                                  joined
    LOCATE, WAIT         by owner of each key, in their order   by position
    COMMIT_KEYS          by owner of each key (``commit``)      by position
    REPLICATE            by owner of each key                   sum
    LIST_KEYS            all owners, each for its ranges        merged by key, cut at the limit
    NODES of an operator all owners, each for its ranges        by node, chunks summed; drained if all say so
    everything else      the leader, or any master              -

An owner's answers are final. Parts refused by an owner, or without one, are split again by the next map and sent again.
An answer counts only if the map still names that master as the owner of all the ranges it answered for, and if the
master knew their terms: an answer from before a range moved away and came back does not count.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeAlias, cast

from msgspec.structs import replace

from tanghulu.errors import KeysMoved, MasterUnavailable, NotLeader, TanghuluError
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.store.client.logic.effects import MASTER, PeerId, owner_peer
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import (
    KeyInfo,
    ListKeysReply,
    ListKeysRequest,
    NodesReply,
    NodesRequest,
    NodeView,
    ReplicateReply,
    ReplicateRequest,
    WaitReply,
    WaitRequest,
)
from tanghulu.store.protocol.key_slots import NUM_RANGES, bits_of, range_of
from tanghulu.store.protocol.messages import LocateReply, LocateRequest, Location, MastersReply
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import LeaseProofs, Signature, Term, TermFence

#: One master's answer for the keys, or ranges, at these positions of a call.
Answer: TypeAlias = tuple[Sequence[int], Any]


class KeyOwners:
    """The map as used by a client. ``key_scope``: the masters' prefix of this client's keys."""

    def __init__(self, known: RangeMap, key_scope: str = "") -> None:
        self.map, self.key_scope = known, key_scope
        self._peers = tuple(None if owner is None else owner_peer(owner) for owner in known.owners)
        self.peers = frozenset(peer for peer in self._peers if peer is not None)

    def range_of(self, key: str) -> int:
        """Return the range of ``key``, as counted by the masters."""
        return range_of(self.key_scope + key)

    def split(self, numbers: Iterable[tuple[int, int]]) -> dict[PeerId, list[int]]:
        """Group the positions of (position, range) by owner of their range, without those that have no owner now."""
        by_owner: dict[PeerId, list[int]] = {}
        for position, number in numbers:
            owner = self._peers[number]
            if owner is not None:
                by_owner.setdefault(owner, []).append(position)
        return by_owner

    def term_of(self, key: str) -> Term:
        """Return the term that a master must know to accept a commit of ``key``."""
        return Term(self.map.term_of(self.range_of(key)), self.map.cluster)

    def accepts(self, peer: PeerId, numbers: Iterable[int], term: Term) -> bool:
        """Return whether an answer of ``peer``, which knew the map of ``term``, counts for these ranges."""
        known = self.map
        return term.cluster == known.cluster and all(
            self._peers[number] == peer and known.terms[number] <= term.number for number in numbers
        )

    def __repr__(self) -> str:
        return f"KeyOwners({self.map})"


def counts(owners: KeyOwners | None, peer: PeerId, numbers: Iterable[int], signature: Signature) -> bool:
    """Return whether an answer of ``peer`` counts for these ranges; ``owners`` None: the leader owns everything."""
    if owners is None or peer == MASTER:
        return owners is None and peer == MASTER
    return owners.accepts(peer, numbers, signature.term)


class KnownMasters:
    """Masters known to a client; ``owners`` is None for a single master. ``fence`` admits terms that have not ended."""

    def __init__(self) -> None:
        self.fence = TermFence()
        self.owners: KeyOwners | None = None
        self._leader_proofs = LeaseProofs()
        self._owner_proofs: dict[PeerId, LeaseProofs] = {}

    def proofs_of(self, peer: PeerId) -> LeaseProofs:
        """Return the proofs of the leader's lease, or of an owner's."""
        return self._owner_proofs.setdefault(peer, LeaseProofs()) if peer else self._leader_proofs

    def owns_keys(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is an owner by the known map."""
        return self.owners is not None and peer in self.owners.peers

    def take(self, reply: MastersReply) -> frozenset[PeerId] | None:
        """Take a master's answer to MASTERS; return owners no longer in its map, or None if the map is not newer."""
        known, latest = self.owners, reply.map
        if latest is None or not latest.replaces(None if known is None else known.map):
            return None
        self.owners = KeyOwners(latest, reply.key_scope) if latest.version else None
        named = frozenset[PeerId]() if self.owners is None else self.owners.peers
        gone = frozenset[PeerId]() if known is None else known.peers - named
        for peer in gone:
            self._owner_proofs.pop(peer, None)
        return gone


class SplitCall:
    """One call on its way to the owners of its keys: the open parts, and the answered ones.

    ``informant`` is a peer that seems to know another map than the caller.
    """

    def __init__(self, call: Call[Any]) -> None:
        self._call, self._request = call, cast(Any, call.request)
        self._keys: Sequence[str] | None = None if call.method in BY_RANGE else self._request.keys
        self._open: Sequence[int] = range(NUM_RANGES if self._keys is None else len(self._keys))
        self._parts: dict[PeerId, Sequence[int]] = {}
        self._answers: list[Answer] = []
        self.informant = MASTER

    def calls(self, owners: KeyOwners | None) -> list[tuple[PeerId, Call[Any]]]:
        """Return the open parts by owner, without keys that have no owner. None: a single master owns everything."""
        if owners is None:
            self._parts = {MASTER: self._open}
        else:
            self._parts = dict(owners.split((position, self._range(owners, position)) for position in self._open))
        return [(peer, self._part(positions)) for peer, positions in self._parts.items()]

    def _range(self, owners: KeyOwners, position: int) -> int:
        return position if self._keys is None else owners.range_of(self._keys[position])

    def _part(self, positions: Sequence[int]) -> Call[Any]:
        if self._keys is None:
            request = replace(self._request, ranges=bits_of(positions))
        elif len(positions) == len(self._keys):
            return self._call
        else:
            request = replace(self._request, keys=[self._keys[position] for position in positions])
        return Call(self._call.method, request, self._call.reply_type)

    def answered(
        self, outcomes: Sequence[Reply[Any] | TanghuluError], owners: KeyOwners | None
    ) -> MasterUnavailable | None:
        """Take an outcome for each of ``calls``; return why something is still open, or None if all is answered.

        ``owners`` are the currently known ones. Raises any other error.
        """
        failure: MasterUnavailable | None = None
        self.informant = MASTER
        done: set[int] = set()
        for (peer, positions), outcome in zip(self._parts.items(), outcomes, strict=True):
            if isinstance(outcome, MasterUnavailable):
                failure = outcome
                if isinstance(outcome, KeysMoved) and owners is not None and outcome.version > owners.map.version:
                    self.informant = peer
            elif isinstance(outcome, TanghuluError):
                raise outcome
            elif self._counts(peer, positions, outcome, owners):
                self._answers.append((positions, outcome.message))
                done.update(positions)
            else:
                failure = NotLeader(f"{peer or 'a master'} answered for keys that it no longer owns; try again")
        self._open = [position for position in self._open if position not in done]
        if self._open and failure is None:
            failure = MasterUnavailable(
                "no master owns these keys now; another takes over when the lease of a lost one expires"
            )
        return failure

    def _counts(self, peer: PeerId, positions: Sequence[int], outcome: Reply[Any], owners: KeyOwners | None) -> bool:
        numbers = () if owners is None else {self._range(owners, position) for position in positions}
        return counts(owners, peer, numbers, outcome.message.signature)

    def reply(self) -> Reply[Any]:
        """Return all answers joined into one."""
        assert not self._open, f"{self!r} is not answered"
        if len(self._answers) == 1 and self._keys is not None:
            return Reply(self._answers[0][1], memoryview(b""))
        return Reply(JOINS[self._call.method](self._request, self._answers), memoryview(b""))

    def __repr__(self) -> str:
        return f"SplitCall({len(self._open)} open, {len(self._answers)} answers)"


# --- the table


def _join_locations(request: LocateRequest, answers: Sequence[Answer]) -> LocateReply:
    found, located = bytearray(len(request.keys)), list[Location | None]([None] * len(request.keys))
    for positions, reply in answers:
        if request.count_only:
            for position, byte in zip(positions, reply.found, strict=True):
                found[position] = byte
        else:
            for position, location in zip(positions, reply.locations, strict=True):
                located[position] = location
    incomplete = any(reply.incomplete for _, reply in answers)
    return LocateReply(incomplete, (), bytes(found)) if request.count_only else LocateReply(incomplete, located)


def _join_waits(request: WaitRequest, answers: Sequence[Answer]) -> WaitReply:
    found = bytearray(len(request.keys))
    for positions, reply in answers:
        for position, byte in zip(positions, reply.found, strict=True):
            found[position] = byte
    return WaitReply(bytes(found))


def _sum_taken(request: ReplicateRequest, answers: Sequence[Answer]) -> ReplicateReply:
    return ReplicateReply(sum(reply.num_taken for _, reply in answers))


def _merge_pages(request: ListKeysRequest, answers: Sequence[Answer]) -> ListKeysReply:
    """Return the first keys of all pages: none behind the end of a page that is followed by more keys."""
    pages = [reply for _, reply in answers]
    ends = [page.keys[-1].key if page.keys else request.after for page in pages if page.more]
    end = min(ends) if ends else None
    keys: list[KeyInfo] = []
    in_order = heapq.merge(*(page.keys for page in pages), key=lambda info: info.key)
    for key, same in groupby(in_order, key=lambda info: info.key):  # keys are unique except in overlapping answers
        if (end is not None and key > end) or (request.limit and len(keys) >= request.limit):
            return ListKeysReply(keys, more=True)
        keys.append(next(same))
    return ListKeysReply(keys, more=bool(ends))


def _sum_up_nodes(request: NodesRequest, answers: Sequence[Answer]) -> NodesReply:
    """Return each node as listed by the master with its latest report; drained if it is for the keys of every owner."""
    by_node: dict[str, list[NodeView]] = {}
    for _, reply in answers:
        for node in reply.nodes:
            by_node.setdefault(node.id, []).append(node)
    nodes = [
        replace(
            min(views, key=lambda view: view.last_seen_s),
            num_chunks=sum(view.num_chunks for view in views),
            num_unsafe=sum(view.num_unsafe for view in views),
            draining=any(view.draining for view in views),
            drained=len(views) == len(answers) and all(view.drained for view in views),
        )
        for _, views in sorted(by_node.items())
    ]
    rebuilding = any(reply.rebuilding for _, reply in answers)
    return NodesReply(nodes, rebuilding, sum(reply.num_keys for _, reply in answers))


#: The methods whose calls are split by ranges, one at each position; the others by their keys.
BY_RANGE = (methods.LIST_KEYS.number, methods.NODES.number)
JOINS: dict[int, Callable[[Any, Sequence[Answer]], Any]] = {
    methods.LOCATE.number: _join_locations,
    methods.WAIT.number: _join_waits,
    methods.REPLICATE.number: _sum_taken,
    methods.LIST_KEYS.number: _merge_pages,
    methods.NODES.number: _sum_up_nodes,
}
