"""Opening a node's SSD tier: which file, and how its parts are wired. And what goes down when the node ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tanghulu.errors import DeadlineExceeded
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.file import TierFile
from tanghulu.store.node.ssd.state import TierState
from tanghulu.store.node.ssd.tier import SsdTier
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import EvictionReason
from tanghulu.store.node.state.ssd_record import MAX_HEAD_BYTES, UNIT
from tanghulu.store.protocol.types import Pin

MIN_SSD_BYTES = 1 << 20
#: How long a node that ends in order writes what it has in memory.
SEND_DOWN_S = 3.0


@dataclass(frozen=True, slots=True)
class SsdPlace:
    """What the operator said: a file, or a directory in which a node is known by its port."""

    path: Path
    size_bytes: int
    port: int

    @property
    def file(self) -> Path:
        """The file."""
        return self.path / f"node-{self.port}.tier" if self.path.is_dir() else self.path


def open_tier(
    place: SsdPlace,
    state: NodeState,
    view: memoryview,
    admission: TierAdmission,
    make_policy: Callable[[], Policy],
    clock: Clock,
) -> SsdTier:
    """The tier below ``state``, still without what its file holds: ``recover`` it. Raises ConfigError."""
    file = TierFile(place.file, place.size_bytes)
    tier = SsdTier(file, TierState(file.capacity_bytes, make_policy, admission, clock), view, state.tier_lost)
    state.tier = tier
    return tier


async def send_down(state: NodeState, tier: SsdTier) -> None:
    """What memory holds goes down, as far as ``SEND_DOWN_S`` goes: for the node's next start.

    What is pinned hard first, then the warmest.
    """
    until_s = asyncio.get_running_loop().time() + SEND_DOWN_S
    pinned = [chunk for chunk in state.table if chunk.is_live and chunk.pin is Pin.HARD]
    for chunk in (*pinned, *reversed(list(state.room.victims()))):
        try:
            if tier.free_queue_bytes < chunk.size_bytes + MAX_HEAD_BYTES + UNIT:
                await tier.performed(until_s)
        except DeadlineExceeded:
            return
        state.evict(chunk, EvictionReason.STOPPING)
