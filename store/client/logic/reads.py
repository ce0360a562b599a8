"""What this client read without asking a node, so that the nodes hear of it: eviction goes by what is read.

A read by means of a node's shared index costs no message. The node is told of such reads a few at a time: with the
``REPORT_READS``-th, or before the next call that is not a get.
"""

from __future__ import annotations

from collections import deque

from tanghulu.store.client.logic.effects import PeerId

REPORT_READS = 64


class Reads:
    """Reads to be told. Every step is one operation of a deque: safe from any thread."""

    def __init__(self) -> None:
        self._noted: deque[tuple[PeerId, str, int]] = deque()

    def note(self, node: PeerId, key: str, size_bytes: int) -> None:
        """``key`` was read on ``node``."""
        self._noted.append((node, key, size_bytes))

    def __bool__(self) -> bool:
        return bool(self._noted)

    @property
    def due(self) -> bool:
        """Whether they should be told even if nothing else has to be said."""
        return len(self._noted) >= REPORT_READS

    def take(self) -> dict[PeerId, tuple[list[str], int]]:
        """(keys in order, bytes) by node; counts as told."""
        taken: dict[PeerId, tuple[list[str], int]] = {}
        while self._noted:
            try:
                node, key, size = self._noted.popleft()
            except IndexError:  # another thread was faster
                break
            keys, num_bytes = taken.get(node, ([], 0))
            keys.append(key)
            taken[node] = keys, num_bytes + size
        return taken
