"""Latency histograms for ``/metrics``, above all of a process's response times, by method."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

#: Upper bounds of the buckets in microseconds: powers of four from 1 us to 17 s.
NUM_BUCKETS = 13
K = TypeVar("K", bound=Hashable)


class Latencies(Generic[K]):
    """Counts by kind (of calls: their method) and bucket; one addition each. Read from any thread.

    ``kinds`` are exported from the start, the others once they have a count.
    """

    def __init__(self, kinds: Iterable[K] = ()) -> None:
        self.counts: dict[K, list[int]] = {kind: [0] * (NUM_BUCKETS + 1) for kind in kinds}
        self.sums_s: dict[K, float] = dict.fromkeys(self.counts, 0.0)

    def took(self, kind: K, seconds: float) -> None:
        """Count one of ``kind`` that took ``seconds``; for a call, from its last byte to its answer or error."""
        counts = self.counts.get(kind)
        if counts is None:
            counts = self.counts[kind] = [0] * (NUM_BUCKETS + 1)
            self.sums_s[kind] = 0.0
        counts[min((int(seconds * 1e6).bit_length() + 1) // 2, NUM_BUCKETS)] += 1
        self.sums_s[kind] += seconds


class HistogramCollector(Collector, Generic[K]):
    """Publishes latencies as one histogram, with the name of each kind as ``label``."""

    def __init__(self, latencies: Latencies[K], name: str, text: str, label: str, name_of: Callable[[K], str]) -> None:
        self._latencies = latencies
        self._what = name, text
        self._label = label
        self._name_of = name_of

    def collect(self) -> Iterator[Metric]:
        """Yield one histogram with a label."""
        family = HistogramMetricFamily(*self._what, labels=[self._label])
        for kind, counts in list(self._latencies.counts.items()):
            total, buckets = 0, []
            for bucket, count in enumerate(counts):
                total += count
                buckets.append((f"{4**bucket / 1e6:g}" if bucket < NUM_BUCKETS else "+Inf", total))
            family.add_metric([self._name_of(kind)], buckets, self._latencies.sums_s[kind])
        yield family


class LatencyCollector(HistogramCollector[str]):
    """Publishes the latencies of the fast lane's calls, by the name of their method."""

    def __init__(self, latencies: Latencies[str]) -> None:
        text = "from the last byte of a fast-lane call to its answer"
        super().__init__(latencies, "tanghulu_rpc_seconds", text, "method", str)
