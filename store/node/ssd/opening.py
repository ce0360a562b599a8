"""Opening a node's SSD tier: which file, and how its parts are wired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.file import TierFile
from tanghulu.store.node.ssd.state import TierState
from tanghulu.store.node.ssd.tier import SsdTier
from tanghulu.store.node.state.ssd_chunk import SsdChunk

MIN_SSD_BYTES = 1 << 20


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
    view: memoryview,
    admission: TierAdmission,
    make_policy: Callable[[], Policy],
    clock: Clock,
    on_lost: Callable[[SsdChunk], None],
) -> SsdTier:
    """A tier below ``view``, still without what its file holds: ``recover`` it. Raises ConfigError."""
    file = TierFile(place.file, place.size_bytes)
    return SsdTier(file, TierState(file.capacity_bytes, make_policy, admission, clock), view, on_lost)
