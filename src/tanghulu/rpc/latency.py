"""How long a process takes to answer calls of the fast lane, by method: histograms for ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.protos import fastlane_pb2

#: Upper ends of the buckets in microseconds: powers of four from 1 us to 17 s.
NUM_BUCKETS = 13


class Latencies:
    """Counts by method and bucket; one addition a call. Read from any thread."""

    def __init__(self) -> None:
        self.counts: dict[int, list[int]] = {}
        self.sums_s: dict[int, float] = {}

    def took(self, method: int, seconds: float) -> None:
        """A call of a method that is served was answered, by an error too, so long after its last byte had come."""
        counts = self.counts.get(method)
        if counts is None:
            counts = self.counts[method] = [0] * (NUM_BUCKETS + 1)
            self.sums_s[method] = 0.0
        counts[min((int(seconds * 1e6).bit_length() + 1) // 2, NUM_BUCKETS)] += 1
        self.sums_s[method] += seconds


class LatencyCollector(Collector):
    """Publishes them."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        """One histogram with a label."""
        family = HistogramMetricFamily(
            "tanghulu_rpc_seconds", "from the last byte of a fast-lane call to its answer", labels=["method"]
        )
        for method, counts in list(self._latencies.counts.items()):
            total, buckets = 0, []
            for bucket, count in enumerate(counts):
                total += count
                buckets.append((f"{4**bucket / 1e6:g}" if bucket < NUM_BUCKETS else "+Inf", total))
            name = fastlane_pb2.Method.Name(fastlane_pb2.Method.ValueType(method)).removeprefix("METHOD_").lower()
            family.add_metric([name], buckets, self._latencies.sums_s[method])
        yield family
