"""Placement of values by the client: on a node of this host if there is one, else as the master advises. Pure.

Several nodes of this host share the keys by rendezvous hashing: a key goes to the node with the highest hash of
(node, key), so concurrent puts of one key from different clients meet at one node, and a node that leaves moves
only its own keys.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

import xxhash

from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.model import NodeView

#: Lifetime of a list of nodes, and of the master's advice, and its random extension: many clients that began
#: together do not ask together for ever.
NODES_TTL_S, NODES_SPREAD_S = 1.0, 1.0
#: Seconds for which no call connects to a node whose host did not answer: each would wait the same time again.
SILENT_PAUSE_S = 5.0
#: Seconds for a suspect node (see ``suspect``) to answer a probe before each call.
PROBE_S = 0.5
#: Seconds for which other nodes are preferred to a suspect one, which only gets calls that cannot wait.
AVOID_S = 5.0
#: Names of nodes that are remembered, including those that left.
MAX_SEEN = 1 << 14
#: Keys whose nodes a client remembers, in 20 MB; others are looked up at the master.
MAX_LOCATIONS = 1 << 16


class ListVersion(NamedTuple):
    """The version of a list of nodes, as counted by the master of that generation."""

    number: int = 0  # 0: there is no list
    generation: int = 0


_NO_VERSION = ListVersion()


class NodeTable:
    """The nodes as last listed. Thread-safe: it is replaced, never changed."""

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id
        self._nodes: dict[PeerId, NodeView] = {}
        self.version = ListVersion()  # of the master's list
        self._rng = Random(secrets.randbits(64))
        self._local: list[tuple[PeerId, int]] = []
        self._local_ids: frozenset[PeerId] = frozenset()
        self.largest_capacity_bytes = 0  # of the known nodes; 0 when none has stated its own
        self._advice: dict[int, tuple[float, tuple[PeerId, ...]]] = {}
        self._fresh_until_s = float("-inf")
        self._seen: set[PeerId] = set()
        self._silent_until_s: dict[PeerId, float] = {}
        self._suspects: dict[PeerId, float] = {}  # end of the time in which others come before them
        self._avoided = frozenset[PeerId]()
        self._lock = threading.Lock()

    def update(self, nodes: Iterable[NodeView], now_s: float, version: ListVersion = _NO_VERSION) -> None:
        """Take the master's list of all nodes."""
        table = {PeerId(node.id): node for node in nodes}
        local = [
            (node_id, xxhash.xxh3_64_intdigest(node_id.encode()))
            for node_id, node in table.items()
            if node.host_id == self._host_id and not node.draining
        ]
        with self._lock:
            self._see(table)
            self._nodes, self._local, self.version = table, local, version
            self._silent_until_s = {node: until_s for node, until_s in self._silent_until_s.items() if node in table}
            self._suspects = {node: until_s for node, until_s in self._suspects.items() if node in table}
            self._local_ids = frozenset(node_id for node_id, _ in local)
            self.largest_capacity_bytes = max((node.capacity_bytes for node in table.values()), default=0)
        self.confirm(now_s)

    def confirm(self, now_s: float) -> None:
        """Record that the master's list equals the known one."""
        self._fresh_until_s = self._until_s(now_s)
        self._avoided = frozenset(node for node, until_s in self._suspects.copy().items() if now_s < until_s)

    def _until_s(self, now_s: float) -> float:
        return now_s + NODES_TTL_S + self._rng.random() * NODES_SPREAD_S

    def learn(self, nodes: Iterable[NodeView]) -> None:
        """Add nodes that arrived with another answer."""
        with self._lock:
            self._nodes = {**self._nodes, **{PeerId(node.id): node for node in nodes}}
            self._see(self._nodes)
            self.largest_capacity_bytes = max((node.capacity_bytes for node in self._nodes.values()), default=0)

    def _see(self, nodes: Iterable[PeerId]) -> None:
        self._seen.update(nodes)
        if len(self._seen) > MAX_SEEN:
            self._seen = set(nodes)

    def has_seen(self, node: PeerId) -> bool:
        """Return whether there is, or was, such a node."""
        return node in self._seen

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the list is recent enough."""
        return now_s < self._fresh_until_s

    def expire(self) -> None:
        """Refresh the list before the next choice, as a node turned out to be gone."""
        self._fresh_until_s = float("-inf")
        self._advice.clear()

    def note_silent(self, node: PeerId, now_s: float) -> None:
        """Record that the host of ``node`` does not answer: no other caller shall wait for it for a while."""
        self.suspect(node, now_s)
        self._silent_until_s[node] = now_s + SILENT_PAUSE_S

    def suspect(self, node: PeerId, now_s: float) -> None:
        """Record that ``node`` did not answer a call in time: it is probed before the next, and ranked last a while."""
        self._suspects[node] = now_s + AVOID_S
        self._avoided |= {node}
        self.expire()

    def answered(self, node: PeerId) -> None:
        """Record a sign of life of ``node``."""
        self._suspects.pop(node, None)
        self._avoided -= {node}
        self._silent_until_s.pop(node, None)

    def is_suspect(self, node: PeerId) -> bool:
        """Return whether the node has given no sign of life since it did not answer in time."""
        return node in self._suspects

    def is_avoided(self, node: PeerId, now_s: float) -> bool:
        """Return whether the node is suspect, and failed to answer a moment ago."""
        return now_s < self._suspects.get(node, now_s)

    def trusted(self, nodes: Sequence[PeerId]) -> list[PeerId]:
        """Return those of ``nodes`` that are not avoided."""
        return [node for node in nodes if node not in self._avoided]

    def trusted_first(self, nodes: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Return the same nodes in their order, avoided ones last."""
        return tuple(sorted(nodes, key=self._avoided.__contains__) if self._avoided else nodes)

    def is_silent(self, node: PeerId, now_s: float) -> bool:
        """Return whether the host of ``node`` failed to answer a moment ago."""
        return now_s < self._silent_until_s.get(node, now_s)

    def get(self, node: PeerId) -> NodeView | None:
        """Return the node, if it is known."""
        return self._nodes.get(node)

    def all(self) -> list[NodeView]:
        """Return all known nodes."""
        return list(self._nodes.values())

    def ids(self) -> list[PeerId]:
        """Return the ids of all known nodes."""
        return list(self._nodes)

    def local_ids(self) -> frozenset[PeerId]:
        """Return the nodes of this host."""
        return self._local_ids

    def local_for(self, key: str, size_bytes: int) -> list[PeerId]:
        """Return the nodes of this host that could hold the value, best first, without avoided ones."""
        local = self._local
        if len(local) > 1:
            digest = xxhash.xxh3_64_intdigest(key.encode())
            local = sorted(local, key=lambda entry: _mix(entry[1] ^ digest), reverse=True)
        fitting = []
        for node_id, _ in local:
            node = self._nodes.get(node_id)
            if node_id in self._avoided:
                continue
            if node is not None and (node.capacity_bytes == 0 or size_bytes <= node.capacity_bytes):
                fitting.append(node_id)
        return fitting

    def spread(self, candidates: Sequence[PeerId]) -> list[PeerId]:
        """Reorder the nodes for several replicas: after the first, a new rack goes before a host that is only new.

        Example: a (rack 1, host 1), b (1, 1), c (1, 2), d (2, 3) becomes a, d, c, b.
        """
        rest = list(candidates)
        chosen: list[PeerId] = []
        racks: set[str] = set()
        hosts: set[str] = set()
        while rest:
            places = [node.place if (node := self._nodes.get(each)) is not None else "" for each in rest]
            new_rack = next((i for i, place in enumerate(places) if place.rpartition("/")[0] not in racks), None)
            new_host = next((i for i, place in enumerate(places) if place not in hosts), 0)
            index = new_host if new_rack is None else new_rack
            racks.add(places[index].rpartition("/")[0])
            hosts.add(places[index])
            chosen.append(rest.pop(index))
        return chosen

    def advise(self, size_bytes: int, nodes: Sequence[PeerId], now_s: float) -> None:
        """Take the master's advice for values of about this size."""
        self._advice[size_bytes.bit_length()] = (self._until_s(now_s), tuple(nodes))

    def advice(self, size_bytes: int, now_s: float) -> tuple[PeerId, ...] | None:
        """Return the master's advice for values of about this size, if it is still fresh."""
        entry = self._advice.get(size_bytes.bit_length())
        return entry[1] if entry is not None and now_s < entry[0] else None


def _mix(value: int) -> int:
    """Spread the bits of an xor, so that the order of nodes differs from key to key (murmur3's finaliser)."""
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 33)


class LocationCache:
    """Cached holders of keys; least recently used keys are forgotten first. Thread-safe."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, tuple[PeerId, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> tuple[PeerId, ...]:
        """Return the last known holders of ``key``, nearest first; none if it is unknown."""
        with self._lock:
            nodes = self._nodes.get(key)
            if nodes is None:
                return ()
            self._nodes.move_to_end(key)
            return nodes

    def set(self, key: str, nodes: tuple[PeerId, ...]) -> None:
        """Record the location of ``key`` from the master, or from a put."""
        with self._lock:
            self._nodes[key] = nodes
            self._nodes.move_to_end(key)
            if len(self._nodes) > MAX_LOCATIONS:
                self._nodes.popitem(last=False)

    def discard(self, key: str, node: PeerId) -> None:
        """Record that ``node`` turned out not to hold ``key``."""
        with self._lock:
            nodes = self._nodes.get(key, ())
            if node in nodes:
                rest = tuple(each for each in nodes if each != node)
                if rest:
                    self._nodes[key] = rest
                else:
                    del self._nodes[key]

    def forget(self, key: str) -> None:
        """Record that ``key`` was removed."""
        with self._lock:
            self._nodes.pop(key, None)

    def __len__(self) -> int:
        return len(self._nodes)
