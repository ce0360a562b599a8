"""Paths to one peer and the choice among them: pure decisions.

A path is (local device, remote endpoint, stream). Paths have ranks: lower is better (shm before tcp; later, devices
near the buffer before the others), and a worse rank is used only when no path of a better one is usable, not when the
better one is merely busy. Within a rank the slice takes the path on which it would end first, by the measured rate; it
waits for a full one if that is sooner still. Without rates, that is the path with the fewest bytes in flight, then the
first: so one small slice opens one stream, and a large batch fills all of them. Example: 400 and 100 MB/s, 4 MiB and
nothing in flight, a slice of 1 MiB: (4 + 1) / 400 = 12 ms against 10 ms: the slow path gets this one, but not the next.
A path without a fresh rate counts as fast as the fastest, so that it is tried.

A path that fails ``pause_after_errors`` times in a row is paused for ``pause_s``, then one batch may probe it; a failed
probe doubles the pause. When every path is paused, the one whose pause ends first is tried anyway: a request is never
refused because of the past alone.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tanghulu.transfer_engine.core.segment import Endpoint


class Capability(Enum):
    """Capability of a path, required by a slice."""

    #: Moves bytes and compares their checksum; any path does.
    DATA = "data"
    #: A message to the owner's program.
    NOTICE = "notice"


#: The transport that carries notices: rdma and ucx bypass the owner's process, and a mapping has no receiver.
NOTICE_TRANSPORT = "tcp"


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One way to a peer; compared by identity, since a peer's paths are made once.

    ``notices_only``: its transport was not requested, but it can carry notices to the owner.
    """

    endpoint: Endpoint
    local_device: str
    stream: int
    rank: int
    notices_only: bool = False

    @property
    def transport(self) -> str:
        """Name of the transport that serves it."""
        return self.endpoint.transport

    @property
    def label(self) -> str:
        """Readable name of the path, such as ``tcp 10.0.0.1:7411 #0``."""
        device = f" via {self.local_device}" if self.local_device else ""
        return f"{self.endpoint.transport} {self.endpoint.address}{device} #{self.stream}"


def endpoint_paths(endpoints: Sequence[Endpoint], rank: int) -> list[Path]:
    """Return one path to each endpoint, over any local device; ranked by the owner's preference."""
    return [Path(each, "", 0, rank + each.distance) for each in endpoints]


class PathState(Enum):
    """Presumed state of a path."""

    #: Works, as far as known.
    UP = "up"
    #: Failed too often; unused for a while.
    PAUSED = "paused"
    #: The pause has ended and one slice was sent to see whether it works again.
    PROBING = "probing"


class PathEvent(Enum):
    """Event on a path."""

    SUCCESS = "success"
    ERROR = "error"
    #: One error more than tolerated.
    ERROR_LIMIT = "error limit"
    PROBE = "probe"


TRANSITIONS: dict[tuple[PathState, PathEvent], PathState] = {
    (PathState.UP, PathEvent.SUCCESS): PathState.UP,
    (PathState.UP, PathEvent.ERROR): PathState.UP,
    (PathState.UP, PathEvent.ERROR_LIMIT): PathState.PAUSED,
    (PathState.PAUSED, PathEvent.SUCCESS): PathState.UP,  # a slice of another batch still on it
    (PathState.PAUSED, PathEvent.ERROR): PathState.PAUSED,
    (PathState.PAUSED, PathEvent.PROBE): PathState.PROBING,
    (PathState.PROBING, PathEvent.SUCCESS): PathState.UP,
    (PathState.PROBING, PathEvent.ERROR): PathState.PAUSED,
    (PathState.PROBING, PathEvent.PROBE): PathState.PROBING,
}


@dataclass(frozen=True, slots=True)
class PauseRule:
    """Conditions and duration of a path's pause."""

    after_errors: int
    pause_s: float
    pause_max_s: float


#: Time for which the best path of an idle moment is reused without a new choice.
_BEST_MEMORY_S = 0.5
#: Age at which an unrefreshed rate is forgotten.
RATE_MEMORY_S = 10.0
#: Share of the newest measurement in a path's rate.
RATE_WEIGHT = 0.3


LATENCY_BOUNDS_S = (25e-6, 50e-6, 1e-4, 2e-4, 4e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass(slots=True)
class PathStats:
    """Statistics of a path since it was made."""

    num_bytes: int = 0
    num_slices: int = 0
    #: Slices lost by it, whether retried or given up.
    num_lost: int = 0
    num_errors: int = 0
    num_pauses: int = 0
    #: Slices with a wrong checksum.
    num_mismatches: int = 0
    #: Slices under way now, of all batches.
    in_flight_bytes: int = 0
    in_flight_slices: int = 0
    #: Slices by the time from post to arrival: up to LATENCY_BOUNDS_S[i], the last beyond all.
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    latency_sum_s: float = 0.0
    #: Last measured rate; 0.0 before the first measurement.
    bytes_per_s: float = 0.0


@dataclass(slots=True)
class _Health:
    state: PathState = PathState.UP
    num_errors: int = 0
    pause_s: float = 0.0
    usable_at_s: float = 0.0
    measured_at_s: float = 0.0
    stats: PathStats = field(default_factory=PathStats)

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
        self._carriers = {each: tuple(filter(lambda path: _carries(path, each), self.paths)) for each in Capability}
        self._late: deque[tuple[Path, int, float]] = deque()  # slices yet to be counted by the lock's holder
        self._best: Path | None = None  # with nothing in flight and no path in trouble
        self._best_until_s = 0.0

    def carries(self, capability: Capability) -> bool:
        """Return whether there is a path for such slices."""
        return bool(self._carriers[capability])

    def choose(
        self,
        now_s: float,
        avoid: Collection[Path],
        in_flight_bytes: Callable[[Path], int],
        length: int = 0,
        is_full: Callable[[Path], bool] = lambda path: False,
        needs: Capability = Capability.DATA,
    ) -> Path | None:
        """Return the path for one slice of ``length`` bytes, or None when it should wait for room.

        ``avoid``: paths that lost this slice before, reused only when there is no other. ``in_flight_bytes(path)``:
        bytes on it now; ``is_full(path)``: whether its window is full. Considers only paths with the capability that
        the slice ``needs``, of which there must be one (see ``carries``).
        """
        usable = self._usable_paths(avoid, now_s, self._carriers[needs])
        if usable:
            best = usable[0] if len(usable) == 1 else self._soonest(usable, now_s, in_flight_bytes, length)
        else:
            best = self._least_bad(avoid, self._carriers[needs])
        if is_full(best):
            return None
        if self._health[best].state is not PathState.UP:
            self._probe(best, now_s)
        return best

    def choose_idle(self, now_s: float, length: int) -> Path:
        """Return the path for a slice that travels alone."""
        best = self._best
        if best is not None and now_s < self._best_until_s:
            return best
        best = self.choose(now_s, (), _nothing_in_flight, length)
        assert best is not None, "no window is full"
        if self._health[best].num_errors == 0:
            self._best, self._best_until_s = best, now_s + _BEST_MEMORY_S
        return best

    def begun(self, path: Path, num_bytes: int) -> None:
        """Count a slice posted on ``path``; ``ended`` follows once for it."""
        stats = self._health[path].stats
        stats.in_flight_bytes += num_bytes
        stats.in_flight_slices += 1

    def ended(self, path: Path, num_bytes: int) -> None:
        """Count the slice as no longer under way, for any reason."""
        stats = self._health[path].stats
        stats.in_flight_bytes -= num_bytes
        stats.in_flight_slices -= 1

    def succeeded(self, path: Path, num_bytes: int = 0, took_s: float = 0.0) -> None:
        """Count the arrival of a slice of ``num_bytes`` over ``path`` after ``took_s`` (0 bytes: a bare answer)."""
        health = self._health[path]
        if num_bytes:
            stats = health.stats
            stats.num_bytes += num_bytes
            stats.num_slices += 1
            stats.latencies[bisect_left(LATENCY_BOUNDS_S, took_s)] += 1
            stats.latency_sum_s += took_s
        if health.num_errors:
            self._recovered(health)

    def succeeded_soon(self, path: Path, num_bytes: int, took_s: float, lock: threading.Lock) -> None:
        """Do ``succeeded`` for a caller that does not hold the ``lock`` of this table, and does not wait for it.

        The lock's holder counts for threads that find it taken: a thread given a lock for which it slept waits for the
        interpreter next, while all others wait for the lock, one after the other, as long as they keep coming.
        """
        self._late.append((path, num_bytes, took_s))
        while self._late and lock.acquire(blocking=False):  # checked again after the release: for late arrivals
            try:
                while self._late:
                    self.succeeded(*self._late.popleft())
            finally:
                lock.release()

    def corrupted(self, path: Path) -> None:
        """Count an arrival over ``path`` with wrong bytes. The path answers, so it is not in trouble."""
        self.succeeded(path)
        self._health[path].stats.num_mismatches += 1

    def measured(self, path: Path, bytes_per_s: float, now_s: float) -> None:
        """Count a rate measured on ``path`` while it was busy."""
        health = self._health[path]
        known = health.stats.bytes_per_s
        fresh = known > 0 and now_s - health.measured_at_s < RATE_MEMORY_S
        health.stats.bytes_per_s = known + RATE_WEIGHT * (bytes_per_s - known) if fresh else bytes_per_s
        health.measured_at_s = now_s

    def failed(self, path: Path, now_s: float, num_slices: int = 1) -> None:
        """Count the loss of everything on ``path``."""
        self._best = None
        health = self._health[path]
        health.num_errors += 1
        health.stats.num_errors += 1
        health.stats.num_lost += num_slices
        if health.state is PathState.UP and health.num_errors < self._rule.after_errors:
            health.step(PathEvent.ERROR)
            return
        health.step(PathEvent.ERROR_LIMIT if health.state is PathState.UP else PathEvent.ERROR)
        health.stats.num_pauses += 1
        health.pause_s = min(max(self._rule.pause_s, 2 * health.pause_s), self._rule.pause_max_s)
        health.usable_at_s = now_s + health.pause_s

    def state(self, path: Path) -> PathState:
        """Return the presumed state of ``path``."""
        return self._health[path].state

    def stats(self, path: Path) -> PathStats:
        """Return the statistics of ``path``, as of now."""
        stats = self._health[path].stats
        return replace(stats, latencies=list(stats.latencies))

    def check(self) -> None:
        """Assert the invariants: only a path with errors is not up."""
        for health in self._health.values():
            assert health.state is PathState.UP or health.num_errors > 0
            assert health.pause_s <= self._rule.pause_max_s
            assert health.stats.in_flight_bytes >= health.stats.in_flight_slices >= 0

    def _recovered(self, health: _Health) -> None:
        health.step(PathEvent.SUCCESS)
        health.num_errors, health.pause_s, health.usable_at_s = 0, 0.0, 0.0

    def _usable(self, path: Path, now_s: float) -> bool:
        health = self._health[path]
        return health.state is PathState.UP or now_s >= health.usable_at_s

    def _usable_paths(self, avoid: Collection[Path], now_s: float, paths: Sequence[Path]) -> list[Path]:
        """Return the usable paths of the best rank that has any."""
        found: list[Path] = []
        for path in paths:
            if found and path.rank != found[0].rank:
                break
            if path not in avoid and self._usable(path, now_s):
                found.append(path)
        return found

    def _soonest(
        self, paths: Sequence[Path], now_s: float, in_flight_bytes: Callable[[Path], int], length: int
    ) -> Path:
        """Return the first of the paths on which the slice would end soonest."""
        rates = [self._fresh_rate(path, now_s) for path in paths]
        fastest = max(rates) or 1.0
        best, best_s = paths[0], float("inf")
        for path, rate in zip(paths, rates, strict=True):
            ends_s = (in_flight_bytes(path) + length) / (rate or fastest)
            if ends_s < best_s:
                best, best_s = path, ends_s
        return best

    def _fresh_rate(self, path: Path, now_s: float) -> float:
        health = self._health[path]
        return health.stats.bytes_per_s if now_s - health.measured_at_s < RATE_MEMORY_S else 0.0

    def _least_bad(self, avoid: Collection[Path], paths: Sequence[Path]) -> Path:
        """Return the untried path whose pause ends first, else that of all; for when no untried path is usable."""
        candidates = [path for path in paths if path not in avoid] or paths
        return min(candidates, key=lambda path: self._health[path].usable_at_s)

    def _probe(self, path: Path, now_s: float) -> None:
        health = self._health[path]
        health.step(PathEvent.PROBE)
        health.usable_at_s = now_s + max(health.pause_s, self._rule.pause_s)  # others wait for the outcome


def _carries(path: Path, capability: Capability) -> bool:
    if capability is Capability.DATA:
        return not path.notices_only
    return path.transport == NOTICE_TRANSPORT


def _nothing_in_flight(path: Path) -> int:
    return 0
