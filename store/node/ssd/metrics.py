"""The metric names of a node's SSD tier, read off its state when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.store.node.ssd.tier import SsdTier
from tanghulu.store.node.state.counters import NodeCounters

_COUNTERS = {
    "already_there": ("tanghulu_node_ssd_clean_evictions", "chunks evicted from memory that were on the SSD already"),
    "written": ("tanghulu_node_ssd_written_chunks", "chunks written to the SSD"),
    "written_bytes": ("tanghulu_node_ssd_written_bytes", "bytes written to the SSD, heads and padding included"),
    "read_bytes": ("tanghulu_node_ssd_read_bytes", "bytes read from the SSD, heads and padding included"),
    "promoted": ("tanghulu_node_ssd_promotions", "chunks brought up to memory"),
    "evictions": ("tanghulu_node_ssd_evictions", "chunks evicted from the SSD"),
    "expired": ("tanghulu_node_ssd_expired", "chunks on the SSD whose time to live ended"),
    "recovered": ("tanghulu_node_ssd_recovered_chunks", "chunks found in the file at the start"),
    "corrupt": ("tanghulu_node_ssd_corrupt_chunks", "chunks dropped because the SSD returned other bytes"),
    "write_errors": ("tanghulu_node_ssd_write_errors", "writes that failed: disk full, I/O error"),
    "read_errors": ("tanghulu_node_ssd_read_errors", "reads that failed"),
}


class TierCollector(Collector):
    """Reads the figures when Prometheus asks (from the metrics thread: plain attribute reads only)."""

    def __init__(self, in_memory: NodeCounters, tier: SsdTier) -> None:
        self._in_memory = in_memory
        self._tier = tier

    def collect(self) -> Iterator[Metric]:
        """All metrics of the tier."""
        tier, counters = self._tier, self._tier.counters
        for name, (metric, text) in _COUNTERS.items():
            yield CounterMetricFamily(metric, text, value=getattr(counters, name))
        hits = CounterMetricFamily("tanghulu_node_tier_hits", "chunks that a get found, by tier", labels=["tier"])
        hits.add_metric(["memory"], max(self._in_memory.hits - counters.hits, 0))
        hits.add_metric(["ssd"], counters.hits)
        yield hits
        admissions = CounterMetricFamily(
            "tanghulu_node_ssd_admissions",
            "chunks evicted from memory, by what the SSD tier did",
            labels=["verdict"],
        )
        for outcome, count in counters.admissions.items():
            admissions.add_metric([outcome.value], count)
        yield admissions
        yield GaugeMetricFamily("tanghulu_node_ssd_capacity_bytes", "bytes the file can hold", tier.capacity_bytes)
        yield GaugeMetricFamily("tanghulu_node_ssd_used_bytes", "bytes of the file that are not free", tier.used_bytes)
        yield GaugeMetricFamily("tanghulu_node_ssd_chunks", "chunks on the SSD", len(tier.state))
        yield GaugeMetricFamily("tanghulu_node_ssd_queued_bytes", "bytes on their way down", tier.queued_bytes)
