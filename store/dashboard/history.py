"""Samples of the last minutes, taken about once a second, and a store's figures between two of them. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from tanghulu.runtime.scraping import Samples, summed

T = TypeVar("T")

#: Samples that are kept, one a second: five minutes.
MAX_SAMPLES = 300
#: What a figure of now looks back on.
WINDOW_S = 60.0


def ratio(part: float, whole: float) -> float | None:
    """``part`` of ``whole``; None of nothing."""
    return part / whole if whole > 0 else None


class SampleLog(Generic[T]):
    """The last ``MAX_SAMPLES`` samples, each with its time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, T]] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def append(self, at_s: float, sample: T) -> None:
        """Take a sample."""
        self._samples.append((at_s, sample))

    def window(self) -> tuple[float, T, T] | None:
        """(seconds, first sample, last sample) of the last ``WINDOW_S`` seconds; None without a sample."""
        if not self._samples:
            return None
        at_s, last = self._samples[-1]
        before_s, first = next(each for each in self._samples if each[0] >= at_s - WINDOW_S)
        return max(at_s - before_s, 1e-9), first, last

    def pairs(self, num_points: int) -> Iterator[tuple[float, float, T, T]]:
        """At most ``num_points`` of (time, seconds since the one before, that one, this one) over what is kept."""
        samples = list(self._samples)
        step = max(1, -(-len(samples) // num_points))
        chosen = samples[::-1][::step][::-1]
        for (before_s, before), (at_s, sample) in itertools.pairwise(chosen):
            yield at_s, max(at_s - before_s, 1e-9), before, sample


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """What a node counts; summed over nodes, what a store does."""

    hits: float = 0.0
    misses: float = 0.0
    puts: float = 0.0
    evictions: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    corrupt_chunks: float = 0.0

    @classmethod
    def on(cls, page: Samples) -> StoreCounters:
        """The counters on a node's page of metrics."""
        found = summed(page)
        return cls(*(found.get(f"tanghulu_node_{each.name}_total", 0.0) for each in fields(cls)))

    def __add__(self, other: StoreCounters) -> StoreCounters:
        return StoreCounters(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def since(self, before: StoreCounters) -> StoreCounters:
        """The growth since ``before``; a counter that shrank began anew, and all of it has come since."""
        pairs = ((getattr(self, each.name), getattr(before, each.name)) for each in fields(self))
        return StoreCounters(*(now - then if now >= then else now for now, then in pairs))


class StoreHistory:
    """What the nodes did in the last minutes. Nodes that come, go or restart make no rate jump or fall below zero.

    Example: node a counts 100 hits, then 110, is restarted, and counts 4: 14 hits have come since the first look.
    """

    def __init__(self) -> None:
        self._log: SampleLog[StoreCounters] = SampleLog()
        self._nodes: dict[str, StoreCounters] = {}
        self.grown = StoreCounters()

    def append(self, at_s: float, nodes: Mapping[str, StoreCounters]) -> None:
        """Take a sample of the nodes that can be read."""
        for node, counters in nodes.items():
            if node in self._nodes:
                self.grown += counters.since(self._nodes[node])
            self._nodes[node] = counters
        self._log.append(at_s, self.grown)

    def now(self) -> dict[str, Any]:
        """Rates of the last ``WINDOW_S`` seconds, and the share of gets that found their key since the nodes' start."""
        window = self._log.window()
        if window is None:
            return {}
        seconds, first, last = window
        total = sum(self._nodes.values(), StoreCounters())
        return _rates(seconds, last.since(first)) | {
            "get_hit_ratio_total": ratio(total.hits, total.hits + total.misses)
        }

    def points(self, num_points: int) -> list[dict[str, Any]]:
        """At most ``num_points`` points over what is kept, each of the time since the one before it."""
        pairs = self._log.pairs(num_points)
        return [{"at_s": at_s} | _rates(seconds, last.since(first)) for at_s, seconds, first, last in pairs]


def _rates(seconds: float, grown: StoreCounters) -> dict[str, Any]:
    return {
        "get_hit_ratio": ratio(grown.hits, grown.hits + grown.misses),
        "gets_per_s": (grown.hits + grown.misses) / seconds,
        "puts_per_s": grown.puts / seconds,
        "evictions_per_s": grown.evictions / seconds,
        "read_bytes_per_s": grown.read_bytes / seconds,
        "written_bytes_per_s": grown.written_bytes / seconds,
    }
