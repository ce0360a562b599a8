"""The last minutes: samples taken about once a second, figures between two of them, and changes. Pure."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar

from tanghulu.runtime.scraping import Samples, summed

T = TypeVar("T")

#: Number of samples kept, one a second: five minutes.
MAX_SAMPLES = 300
#: Seconds covered by the current figures.
WINDOW_S = 60.0
#: Number of events kept.
MAX_EVENTS = 200


def ratio(part: float, whole: float) -> float | None:
    """Return ``part`` of ``whole``; None if ``whole`` is 0."""
    return part / whole if whole > 0 else None


class History(ABC, Generic[T]):
    """The last ``MAX_SAMPLES`` samples, and figures between two of them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, T]] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    @abstractmethod
    def figures(self, seconds: float, first: T, last: T) -> dict[str, Any]:
        """Return the figures between two samples ``seconds`` apart."""

    def append(self, at_s: float, sample: T) -> None:
        """Take a sample."""
        self._samples.append((at_s, sample))

    def now(self) -> dict[str, Any]:
        """Return the figures of the last ``WINDOW_S`` seconds; nothing without a sample."""
        if not self._samples:
            return {}
        at_s, last = self._samples[-1]
        before_s, first = next(each for each in self._samples if each[0] >= at_s - WINDOW_S)
        return self.figures(max(at_s - before_s, 1e-9), first, last)

    def points(self, num_points: int) -> list[dict[str, Any]]:
        """Return at most ``num_points`` points over all samples, each for the time since the one before it."""
        samples = list(self._samples)
        step = max(1, -(-len(samples) // num_points))
        return [
            {"at_s": at_s} | self.figures(max(at_s - before_s, 1e-9), first, last)
            for (before_s, first), (at_s, last) in itertools.pairwise(samples[::-1][::step][::-1])
        ]


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Counters of a node; summed over nodes, those of a store."""

    hits: float = 0.0
    misses: float = 0.0
    puts: float = 0.0
    evictions: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    corrupt_chunks: float = 0.0

    @classmethod
    def on(cls, page: Samples) -> StoreCounters:
        """Return the counters on a node's page of metrics."""
        found = summed(page)
        return cls(*(found.get(f"tanghulu_node_{each.name}_total", 0.0) for each in fields(cls)))

    def __add__(self, other: StoreCounters) -> StoreCounters:
        return StoreCounters(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def since(self, before: StoreCounters) -> StoreCounters:
        """Return the growth since ``before``; a counter that shrank was restarted, so all of it is growth."""
        pairs = ((getattr(self, each.name), getattr(before, each.name)) for each in fields(self))
        return StoreCounters(*(now - then if now >= then else now for now, then in pairs))


class StoreHistory(History[StoreCounters]):
    """Activity of the nodes in the last minutes. Nodes that come, go or restart make no rate jump or fall below zero.

    Example: node a counts 100 hits, then 110, is restarted, and counts 4: 14 hits have come since the first look.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, StoreCounters] = {}
        self.grown = StoreCounters()

    def observe(self, at_s: float, nodes: Mapping[str, StoreCounters]) -> None:
        """Take a sample of the readable nodes."""
        for node, counters in nodes.items():
            if node in self._nodes:
                self.grown += counters.since(self._nodes[node])
            self._nodes[node] = counters
        self.append(at_s, self.grown)

    def now(self) -> dict[str, Any]:
        """Return rates of the last ``WINDOW_S`` seconds, and the share of gets that hit since the nodes' start."""
        if not len(self):
            return {}
        total = sum(self._nodes.values(), StoreCounters())
        return super().now() | {"get_hit_ratio_total": ratio(total.hits, total.hits + total.misses)}

    def figures(self, seconds: float, first: StoreCounters, last: StoreCounters) -> dict[str, Any]:
        """Return rates, and the share of gets that hit."""
        grown = last.since(first)
        return {
            "get_hit_ratio": ratio(grown.hits, grown.hits + grown.misses),
            "gets_per_s": (grown.hits + grown.misses) / seconds,
            "puts_per_s": grown.puts / seconds,
            "evictions_per_s": grown.evictions / seconds,
            "read_bytes_per_s": grown.read_bytes / seconds,
            "written_bytes_per_s": grown.written_bytes / seconds,
        }


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One change; ``number`` counts from 1, ``at_s`` is the time of day."""

    number: int
    at_s: float
    kind: str
    text: str


class EventLog:
    """The last ``MAX_EVENTS`` changes of workers, nodes and counters."""

    def __init__(self) -> None:
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._states: dict[str, str] = {}
        self._counts: dict[str, float] = {}
        self._number = 0

    def states(self, at_s: float, part: str, states: Mapping[str, str]) -> None:
        """Compare the parts of one kind (``part``: "worker", "node"), each with its state, with the previous ones."""
        known = {name.partition(" ")[2]: state for name, state in self._states.items() if name.startswith(f"{part} ")}
        for name, state in states.items():
            if known.get(name) != state:
                self._add(at_s, f"{part}.{state}", f"{part} {name} is {state}")
        for name in known.keys() - states.keys():
            self._add(at_s, f"{part}.gone", f"{part} {name} is gone")
            del self._states[f"{part} {name}"]
        self._states |= {f"{part} {name}": state for name, state in states.items()}

    def count(self, at_s: float, kind: str, total: float, text: str) -> None:
        """Record the growth of the counter ``kind``; ``text`` describes it, with {} in place of the growth."""
        grown = total - self._counts.get(kind, total)
        self._counts[kind] = total
        if grown > 0:
            self._add(at_s, kind, text.format(int(grown)))

    def last(self, num_events: int) -> list[dict[str, Any]]:
        """Return the newest events, newest first."""
        return [asdict(each) for each in list(self._events)[: -num_events - 1 : -1]]

    def _add(self, at_s: float, kind: str, text: str) -> None:
        self._number += 1
        self._events.append(ClusterEvent(self._number, at_s, kind, text))
