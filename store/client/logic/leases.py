"""Leases held by this client, the memory that depends on them, and reads to be reported.

Reads without a copy depend on a lease of the node. Objects that refer to that memory (a Chunk, a numpy array, a torch
tensor) keep a LeasedMemory alive; when the last reference is dropped, so is its lease, which is returned with the next
call, or, once the client is closed, by ``drivers.late_leases``. So a range is never reused under an array in use, and
nothing is sent from inside a garbage collection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.protocol.directory_messages import MAX_KEYS_PER_CALL

#: Number of reads after which they are reported to the nodes.
REPORT_READS = 64


class Leases:
    """The leases on all nodes; ``dropped`` ones are to be returned.

    Every step is one operation of a dict or deque: safe from any thread and from GC.
    """

    def __init__(self) -> None:
        self._held: dict[PeerId, dict[int, None]] = {}
        self.dropped: deque[tuple[PeerId, int]] = deque()
        self.on_drop: Callable[[], None] | None = None  # of a closed client, which makes no more calls

    def hold(self, node: PeerId, lease_id: int) -> None:
        """Record a lease granted by the node."""
        self._held.setdefault(node, {})[lease_id] = None

    def released(self, node: PeerId, lease_id: int) -> None:
        """Record that the node has ended the lease, or will with the call being made."""
        self._held.setdefault(node, {}).pop(lease_id, None)

    def drop(self, node: PeerId, lease_id: int) -> None:
        """Mark the lease as unneeded, to be returned soon."""
        self.dropped.append((node, lease_id))
        if self.on_drop is not None:
            self.on_drop()

    def take_dropped(self) -> dict[PeerId, list[int]]:
        """Take the leases to return now, by node; they count as released."""
        taken: dict[PeerId, list[int]] = {}
        while self.dropped:
            try:
                node, lease_id = self.dropped.popleft()
            except IndexError:  # another thread was faster
                break
            taken.setdefault(node, []).append(lease_id)
            self.released(node, lease_id)
        return taken

    def held(self, node: PeerId) -> list[int]:
        """Return all leases on one node in the order of their grants, including dropped ones."""
        return list(self._held.get(node, ()))

    def holders(self) -> list[PeerId]:
        """Return the nodes that granted leases."""
        return [node for node, leases in list(self._held.items()) if leases]

    @property
    def num_held(self) -> int:
        """Leases on all nodes."""
        return sum(len(leases) for leases in self._held.values())


class Reads:
    """Reads without a call to a node, to be reported to it, since eviction depends on reads.

    A read by a node's shared index costs no message. Such reads are reported in small batches: with the
    ``REPORT_READS``-th, or before the next call that is not a get. ``noted`` are (node, key, size); ``due`` means that
    they should be reported even without another notice. Every step is one operation of a deque: safe from any thread.
    """

    def __init__(self) -> None:
        self.noted: deque[tuple[PeerId, str, int]] = deque(maxlen=MAX_KEYS_PER_CALL)  # the oldest matter least
        self.due = False

    def note(self, node: PeerId, key: str, size_bytes: int) -> None:
        """Record a read of ``key`` on ``node``."""
        self.noted.append((node, key, size_bytes))
        self.due = len(self.noted) >= REPORT_READS

    def take(self) -> dict[PeerId, tuple[list[str], int]]:
        """Take (keys in order, bytes), by node, to be reported now."""
        self.due = False
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


class LeasedMemory:
    """Read-only memory of a mapped segment, as numpy's array interface; drops its lease with the last reference."""

    __slots__ = ("__array_interface__", "_drop", "_keep")

    def __init__(self, address: int, size_bytes: int, keep: object, drop: Callable[[], None]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, True),
            "version": 3,
        }
        self._keep = keep  # the mapping
        self._drop = drop

    def __del__(self) -> None:
        self._drop()
