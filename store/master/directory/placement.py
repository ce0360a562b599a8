"""Which nodes a new chunk should go to. Pure: the nodes, the request and a random generator in, an order out.

Near first: the node the caller prefers, then those on its own host (a copy there moves at memory speed). The
rest by two random choices, the one with more free bytes wins: as good as the emptiest for balance, without sending
every client to the same node until its next announcement (Mitzenmacher, "The Power of Two Choices", 2001). A cache
is full in its normal state; then all nodes have nothing free and the choice is a fair coin, while a node that joins
empty wins every pairing that it is drawn in. Replicas go to another rack, else another host, else another node.

Worked example: replicas=2, the client stands on host h1 with nodes A and B; C (h2, same rack) and D (h3, other rack)
live too. A is first (own host, most free). D is the only one in a new rack, so D. The spares: C (new host) and B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from tanghulu.types import Place

#: Nodes named beyond the replicas that were asked for, so that a client can fall back without asking again.
NUM_SPARES = 2
MAX_REPLICAS = 16


class PlacementCandidate(NamedTuple):
    """A node as placement sees it."""

    node_id: str
    place: Place
    capacity_bytes: int
    used_bytes: int
    draining: bool = False

    @property
    def free_bytes(self) -> int:
        """Bytes that need no eviction."""
        return max(self.capacity_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A value of ``size_bytes`` that is to be placed on ``replicas`` nodes, from a client at ``client_place``."""

    size_bytes: int
    replicas: int = 1
    prefer_node: str = ""
    client_place: Place | None = None


def place(candidates: Sequence[PlacementCandidate], request: PlacementRequest, rng: Random) -> list[PlacementCandidate]:
    """The nodes for ``request``, best first: ``replicas`` of them and spares, fewer where fewer could hold the value.

    Draining nodes are never named. A replica count beyond MAX_REPLICAS is cut to it.
    """
    rest = [c for c in candidates if not c.draining and c.capacity_bytes >= max(request.size_bytes, 1)]
    wanted = min(max(request.replicas, 1), MAX_REPLICAS) + NUM_SPARES
    chosen: list[PlacementCandidate] = []
    while rest and len(chosen) < wanted:
        pick = _first(rest, request) if not chosen else None
        if pick is None:
            pick = _two_choices(_farthest(rest, chosen), rng)
        rest.remove(pick)
        chosen.append(pick)
    return chosen


def place_copy(
    candidates: Sequence[PlacementCandidate], holders: Sequence[PlacementCandidate], size_bytes: int, rng: Random
) -> PlacementCandidate | None:
    """The node for one more copy of a chunk that ``holders`` have, far from all of them; None if there is none."""
    taken = {holder.node_id for holder in holders}
    rest = [
        c for c in candidates if not c.draining and c.capacity_bytes >= max(size_bytes, 1) and c.node_id not in taken
    ]
    return _two_choices(_farthest(rest, holders), rng) if rest else None


def _first(nodes: Sequence[PlacementCandidate], request: PlacementRequest) -> PlacementCandidate | None:
    for node in nodes:
        if node.node_id == request.prefer_node:
            return node
    if request.client_place is None:
        return None
    local = [n for n in nodes if n.place == request.client_place]
    return max(local, key=lambda n: (n.free_bytes, n.node_id), default=None)


def _farthest(
    nodes: Sequence[PlacementCandidate], chosen: Sequence[PlacementCandidate]
) -> Sequence[PlacementCandidate]:
    if not chosen:
        return nodes
    racks = {(c.place.zone, c.place.rack) for c in chosen}
    hosts = {c.place for c in chosen}
    other_racks = [n for n in nodes if (n.place.zone, n.place.rack) not in racks]
    return other_racks or [n for n in nodes if n.place not in hosts] or nodes


def _two_choices(nodes: Sequence[PlacementCandidate], rng: Random) -> PlacementCandidate:
    if len(nodes) == 1:
        return nodes[0]
    one, other = rng.sample(range(len(nodes)), 2)
    return max(nodes[one], nodes[other], key=lambda n: n.free_bytes)
