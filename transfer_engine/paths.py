"""Paths to one peer and which of them to use: pure decisions.

A path is (local device, remote endpoint, stream). Paths have ranks: lower is better (shm before tcp; later, devices
near the buffer before the others), and a worse rank is used only when no path of a better one is usable, not when the
better one is merely busy. Within a rank the path with the fewest bytes in flight wins, then the first: so one small
slice opens one stream, and a large batch fills all of them.

A path that fails ``pause_after_errors`` times in a row is paused for ``pause_s``, then one batch may probe it; a failed
probe doubles the pause. When every path is paused, the one whose pause ends first is tried anyway: a request is never
refused because of the past alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from tanghulu.transfer_engine.segment import Endpoint


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One way to a peer; compared by identity, since a peer's paths are made once."""

    endpoint: Endpoint
    local_device: str
    stream: int
    rank: int

    @property
    def transport(self) -> str:
        """Name of the transport that serves it."""
        return self.endpoint.transport

    @property
    def label(self) -> str:
        """For people: ``tcp 10.0.0.1:7411 #0``."""
        device = f" via {self.local_device}" if self.local_device else ""
        return f"{self.endpoint.transport} {self.endpoint.address}{device} #{self.stream}"


class PathState(Enum):
    """What is believed about a path."""

    #: Works, as far as anybody knows.
    UP = "up"
    #: Failed too often; left alone for a while.
    PAUSED = "paused"
    #: The pause is over and one slice was sent to see whether it works again.
    PROBING = "probing"


class PathEvent(Enum):
    """What happens on a path."""

    SUCCESS = "success"
    ERROR = "error"
    #: One error more than is borne.
    ERROR_LIMIT = "error limit"
    PROBE = "probe"


TRANSITIONS: dict[tuple[PathState, PathEvent], PathState] = {
    (PathState.UP, PathEvent.SUCCESS): PathState.UP,
    (PathState.UP, PathEvent.ERROR): PathState.UP,
    (PathState.UP, PathEvent.ERROR_LIMIT): PathState.PAUSED,
    (PathState.PAUSED, PathEvent.SUCCESS): PathState.UP,  # a slice of another batch that was on it still
    (PathState.PAUSED, PathEvent.ERROR): PathState.PAUSED,
    (PathState.PAUSED, PathEvent.PROBE): PathState.PROBING,
    (PathState.PROBING, PathEvent.SUCCESS): PathState.UP,
    (PathState.PROBING, PathEvent.ERROR): PathState.PAUSED,
    (PathState.PROBING, PathEvent.PROBE): PathState.PROBING,
}


@dataclass(frozen=True, slots=True)
class PauseRule:
    """When a path is paused and for how long."""

    after_errors: int
    pause_s: float
    pause_max_s: float


@dataclass(slots=True)
class _Health:
    state: PathState = PathState.UP
    num_errors: int = 0
    pause_s: float = 0.0
    usable_at_s: float = 0.0

    def step(self, event: PathEvent) -> None:
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"a path cannot take {event.value} in {self.state.value}"
        self.state = following


class PathTable:
    """The paths to one peer with their health; not thread-safe, the engine's lock guards it."""

    def __init__(self, paths: Sequence[Path], rule: PauseRule) -> None:
        assert paths, "a peer has at least one path"
        self.paths = tuple(sorted(paths, key=lambda path: (path.rank, path.stream)))
        self._rule = rule
        self._health = {path: _Health() for path in self.paths}

    def choose(
        self, now_s: float, avoid: Collection[Path], in_flight_bytes: Callable[[Path], int | None]
    ) -> Path | None:
        """The path for one slice, or None when it shall wait for room.

        ``avoid``: paths that lost this slice before; they are taken again only when there is no other.
        ``in_flight_bytes(path)``: bytes on it now, None when its window is full.
        """
        best: Path | None = None
        best_bytes = -1
        rank = -1  # of the usable paths seen so far
        for path in self.paths:
            if path in avoid or not self._usable(path, now_s):
                continue
            if rank not in (-1, path.rank):
                break
            rank = path.rank
            load = in_flight_bytes(path)
            if load is not None and (best is None or load < best_bytes):
                best, best_bytes = path, load
        if rank == -1:
            best = self._least_bad(avoid, in_flight_bytes)
        if best is not None and self._health[best].state is not PathState.UP:
            self._probe(best, now_s)
        return best

    def succeeded(self, path: Path) -> None:
        """A slice arrived over ``path``."""
        health = self._health[path]
        if health.num_errors:
            health.step(PathEvent.SUCCESS)
            health.num_errors, health.pause_s, health.usable_at_s = 0, 0.0, 0.0

    def failed(self, path: Path, now_s: float) -> None:
        """``path`` lost what was on it."""
        health = self._health[path]
        health.num_errors += 1
        if health.state is PathState.UP and health.num_errors < self._rule.after_errors:
            health.step(PathEvent.ERROR)
            return
        health.step(PathEvent.ERROR_LIMIT if health.state is PathState.UP else PathEvent.ERROR)
        health.pause_s = min(max(self._rule.pause_s, 2 * health.pause_s), self._rule.pause_max_s)
        health.usable_at_s = now_s + health.pause_s

    def state(self, path: Path) -> PathState:
        """What is believed about ``path``."""
        return self._health[path].state

    def check(self) -> None:
        """Assert the invariants: only a path with errors is not up."""
        for health in self._health.values():
            assert health.state is PathState.UP or health.num_errors > 0
            assert health.pause_s <= self._rule.pause_max_s

    def _usable(self, path: Path, now_s: float) -> bool:
        health = self._health[path]
        return health.state is PathState.UP or now_s >= health.usable_at_s

    def _least_bad(self, avoid: Collection[Path], in_flight_bytes: Callable[[Path], int | None]) -> Path | None:
        """No path that was not tried yet is usable: the one of them whose pause ends first, or of all."""
        candidates = [path for path in self.paths if path not in avoid] or self.paths
        best = min(candidates, key=lambda path: self._health[path].usable_at_s)
        return best if in_flight_bytes(best) is not None else None

    def _probe(self, path: Path, now_s: float) -> None:
        health = self._health[path]
        health.step(PathEvent.PROBE)
        health.usable_at_s = now_s + max(health.pause_s, self._rule.pause_s)  # others wait for the outcome
