"""Which nodes are known to hold which keys: a bounded cache that may be wrong, and never the last word."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tanghulu.store.client.logic.effects import PeerId

MAX_LOCATIONS = 1 << 20


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
