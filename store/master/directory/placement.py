"""Placement of new chunks. Pure: the nodes, the request and a random generator in, an order out.

Near first: the node preferred by the caller, then those on its own host (a copy there moves at memory speed). The rest
by two random choices, of which the one with more free bytes wins: as good as the emptiest for balance, without sending
every client to the same node until its next announcement (Mitzenmacher, "The Power of Two Choices", 2001). A cache is
full in its normal state; then all nodes have nothing free and the choice is a fair coin, while a node that joins empty
wins every pairing it is drawn in. Replicas go to another rack, else another host, else another node.

Worked example: replicas=2, the client is on host h1 with nodes A and B; C (h2, same rack) and D (h3, other rack) are
alive too. A is first (own host, most free). D is the only one in a new rack, so D. The spares: C (new host) and B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

from tanghulu.types import Place

#: Nodes named beyond the requested replicas, so that a client can fall back without asking again.
NUM_SPARES = 2
MAX_REPLICAS = 16
#: Up to this number, nodes are checked one by one.
_FEW = 16
_MAX_DRAWS = 32
_Rack: TypeAlias = tuple[str, str]


class PlacementCandidate(NamedTuple):
    """A node as used by placement."""

    node_id: str
    place: Place
    capacity_bytes: int
    used_bytes: int
    draining: bool = False

    @property
    def rack(self) -> _Rack:
        """The node's rack."""
        return self.place.zone, self.place.rack

    def takes(self, size_bytes: int) -> bool:
        """Return whether it could hold a new value of ``size_bytes``."""
        return not self.draining and self.capacity_bytes >= max(size_bytes, 1)

    @property
    def free_bytes(self) -> int:
        """Bytes that need no eviction."""
        return max(self.capacity_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A value of ``size_bytes`` to be placed on ``replicas`` nodes, from a client at ``client_place``."""

    size_bytes: int
    replicas: int = 1
    prefer_node: str = ""
    client_place: Place | None = None


class PlacementTable:
    """The nodes as used by placement. Placing a chunk costs the same for ten nodes and for ten thousand.

    Nodes are drawn from an array of those that take chunks, and redrawn until they have room and the right location;
    that is as good as checking all of them, which is done only after ``_MAX_DRAWS`` draws, and for few nodes.
    """

    def __init__(self) -> None:
        self.candidates: dict[str, PlacementCandidate] = {}
        self._takers: list[str] | None = None  # ids of nodes that are not draining; None: they have changed
        self._by_host: dict[Place, list[str]] = {}
        self._racks: set[_Rack] = set()

    def set(self, node: PlacementCandidate) -> None:
        """Enter a node, or its new figures."""
        before = self.candidates.get(node.node_id)
        self.candidates[node.node_id] = node
        if before is None or before.place != node.place or before.draining != node.draining:
            self._takers = None

    def remove(self, node_id: str) -> None:
        """Forget a node."""
        if self.candidates.pop(node_id, None) is not None:
            self._takers = None

    def place(self, request: PlacementRequest, rng: Random) -> list[PlacementCandidate]:
        """Return the nodes for ``request``, best first: ``replicas`` and spares, or fewer if few could hold the value.

        Draining nodes are never named. A replica count beyond MAX_REPLICAS is reduced to it.
        """
        wanted = min(max(request.replicas, 1), MAX_REPLICAS) + NUM_SPARES
        first = self._first(request)
        chosen = [] if first is None else [first]
        while len(chosen) < wanted:
            pick = self._next(chosen, request.size_bytes, rng)
            if pick is None:
                break
            chosen.append(pick)
        return chosen

    def _first(self, request: PlacementRequest) -> PlacementCandidate | None:
        preferred = self.candidates.get(request.prefer_node)
        if preferred is not None and preferred.takes(request.size_bytes):
            return preferred
        if request.client_place is None:
            return None
        self._arrange()
        near = [self.candidates[each] for each in self._by_host.get(request.client_place, ())]
        fitting = [node for node in near if node.takes(request.size_bytes)]
        return max(fitting, key=lambda n: (n.free_bytes, n.node_id), default=None)

    def _next(self, chosen: list[PlacementCandidate], size_bytes: int, rng: Random) -> PlacementCandidate | None:
        takers = self._arrange()
        racks, hosts = {c.rack for c in chosen}, {c.place for c in chosen}
        drawn: list[PlacementCandidate] = []
        if len(takers) > _FEW:
            for _ in range(_MAX_DRAWS):
                node = self.candidates[takers[int(rng.random() * len(takers))]]
                elsewhere = node.rack not in racks if len(self._racks) > len(racks) else node.place not in hosts
                if node.takes(size_bytes) and elsewhere and node not in drawn:
                    drawn.append(node)
                    if len(drawn) == 2:
                        return max(drawn, key=lambda n: n.free_bytes)
        taken = {c.node_id for c in chosen}
        rest = [c for each in takers if each not in taken and (c := self.candidates[each]).takes(size_bytes)]
        return _two_choices(_farthest(rest, chosen), rng) if rest else None

    def _arrange(self) -> list[str]:
        if self._takers is None:
            nodes = [node for node in self.candidates.values() if not node.draining]
            self._takers = [node.node_id for node in nodes]
            self._racks = {node.rack for node in nodes}
            self._by_host = {}
            for node in nodes:
                self._by_host.setdefault(node.place, []).append(node.node_id)
        return self._takers

    def check(self) -> None:
        """Assert that the arrays match the nodes."""
        assert all(node.node_id == node_id for node_id, node in self.candidates.items())
        nodes = [node for node in self.candidates.values() if not node.draining]
        if self._takers is not None:
            assert sorted(self._takers) == sorted(node.node_id for node in nodes)
            assert sorted(each for ids in self._by_host.values() for each in ids) == sorted(self._takers)
            assert self._racks == {node.rack for node in nodes}


def place_copy(
    candidates: Sequence[PlacementCandidate], holders: Sequence[PlacementCandidate], size_bytes: int, rng: Random
) -> PlacementCandidate | None:
    """Return the node for one more copy of a chunk, far from all its ``holders``; None if there is none."""
    taken = {holder.node_id for holder in holders}
    rest = [c for c in candidates if c.takes(size_bytes) and c.node_id not in taken]
    return _two_choices(_farthest(rest, holders), rng) if rest else None


def _farthest(
    nodes: Sequence[PlacementCandidate], chosen: Sequence[PlacementCandidate]
) -> Sequence[PlacementCandidate]:
    if not chosen:
        return nodes
    racks = {c.rack for c in chosen}
    hosts = {c.place for c in chosen}
    other_racks = [n for n in nodes if n.rack not in racks]
    return other_racks or [n for n in nodes if n.place not in hosts] or nodes


def _two_choices(nodes: Sequence[PlacementCandidate], rng: Random) -> PlacementCandidate:
    if len(nodes) == 1:
        return nodes[0]
    one, other = rng.sample(range(len(nodes)), 2)
    return max(nodes[one], nodes[other], key=lambda n: n.free_bytes)
