"""What a client remembers of keys: which nodes hold them (bounded, and maybe wrong), and which it read unasked."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from tanghulu.store.client.logic.effects import PeerId

MAX_LOCATIONS = 1 << 20
#: Nodes are told of that many reads at the latest.
REPORT_READS = 64


class LocationCache:
    """Least recently used keys are forgotten first. Safe to use from several threads."""

    def __init__(self, max_keys: int = MAX_LOCATIONS) -> None:
        self._max_keys = max_keys
        self._nodes: OrderedDict[str, tuple[PeerId, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> tuple[PeerId, ...]:
        """The nodes that held ``key`` when it was last heard of, nearest first; none if unknown."""
        with self._lock:
            nodes = self._nodes.get(key)
            if nodes is None:
                return ()
            self._nodes.move_to_end(key)
            return nodes

    def set(self, key: str, nodes: tuple[PeerId, ...]) -> None:
        """The master, or a put, says where ``key`` is."""
        with self._lock:
            self._nodes[key] = nodes
            self._nodes.move_to_end(key)
            if len(self._nodes) > self._max_keys:
                self._nodes.popitem(last=False)

    def discard(self, key: str, node: PeerId) -> None:
        """``node`` turned out not to hold ``key``."""
        with self._lock:
            nodes = self._nodes.get(key, ())
            if node in nodes:
                rest = tuple(each for each in nodes if each != node)
                if rest:
                    self._nodes[key] = rest
                else:
                    del self._nodes[key]

    def forget(self, key: str) -> None:
        """``key`` was removed."""
        with self._lock:
            self._nodes.pop(key, None)

    def __len__(self) -> int:
        return len(self._nodes)


class Reads:
    """What this client read without asking a node, so that the nodes hear of it: eviction goes by what is read.

    A read by means of a node's shared index costs no message. The node is told of such reads a few at a time: with the
    ``REPORT_READS``-th, or before the next call that is not a get. ``noted`` are (node, key, size). Every step is one
    operation of a deque: safe from any thread.
    """

    def __init__(self) -> None:
        self.noted: deque[tuple[PeerId, str, int]] = deque()

    def note(self, node: PeerId, key: str, size_bytes: int) -> None:
        """``key`` was read on ``node``."""
        self.noted.append((node, key, size_bytes))

    @property
    def due(self) -> bool:
        """Whether they should be told even if nothing else has to be said."""
        return len(self.noted) >= REPORT_READS

    def take(self) -> dict[PeerId, tuple[list[str], int]]:
        """(keys in order, bytes) by node; counts as told."""
        taken: dict[PeerId, tuple[list[str], int]] = {}
        while self.noted:
            try:
                node, key, size = self.noted.popleft()
            except IndexError:  # another thread was faster
                break
            keys, num_bytes = taken.get(node, ([], 0))
            keys.append(key)
            taken[node] = keys, num_bytes + size
        return taken
