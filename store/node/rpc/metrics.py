"""The metric names of a store node, of its tenants and its SSD tier, computed from their state when scraped.

The collectors run in the metrics thread: plain attribute reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.rpc.latency import HistogramCollector, Latencies
from tanghulu.store.node.ssd.tier import SsdTier
from tanghulu.store.node.state.counters import NodeCounters
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.writes.puts import WaitEnd
from tanghulu.store.protocol.messages import TenantFigures

_NODE_COUNTERS = {
    "puts": ("tanghulu_node_puts", "chunks that were put"),
    "puts_existed": ("tanghulu_node_puts_existed", "puts whose key was there already"),
    "hits": ("tanghulu_node_hits", "chunks that a get found"),
    "hit_bytes": ("tanghulu_node_hit_bytes", "bytes of the chunks that a get found"),
    "misses": ("tanghulu_node_misses", "keys that a get did not find"),
    "evictions": ("tanghulu_node_evictions", "chunks evicted from memory"),
    "evicted_bytes": ("tanghulu_node_evicted_bytes", "bytes of the chunks evicted"),
    "expired": ("tanghulu_node_expired", "chunks whose time to live ended"),
    "removed": ("tanghulu_node_removed", "chunks removed by clients"),
    "refused": ("tanghulu_node_refused", "chunks dropped because another put of the key was announced first"),
    "corrupt": ("tanghulu_node_corrupt_chunks", "chunks dropped because their bytes did not match their checksums"),
    "lease_waits": ("tanghulu_node_lease_waits", "puts that had to wait for leases, or until room was made"),
    "store_full": ("tanghulu_node_store_full", "puts refused because leases did not end in time"),
}


_NODE_GAUGES: dict[str, tuple[str, Callable[[NodeState], int]]] = {
    "tanghulu_node_capacity_bytes": ("bytes the node can hold", lambda node: node.chunks.capacity_bytes),
    "tanghulu_node_used_bytes": ("bytes that are not free", lambda node: node.chunks.used_bytes),
    "tanghulu_node_largest_free_bytes": (
        "the longest range that is free",
        lambda node: node.counters.largest_free_bytes,
    ),
    "tanghulu_node_chunks": ("chunks that can be found", lambda node: len(node.chunks)),
    "tanghulu_node_leases": ("leases that are not over", lambda node: len(node.leases)),
    "tanghulu_node_waiting_puts": ("puts that wait for room", lambda node: len(node.waiters)),
    "tanghulu_node_write_buffers": ("ranges that clients write into", lambda node: node.buffers.num_open),
    "tanghulu_node_write_buffer_heads": ("those that clients may still see", lambda node: node.buffers.num_heads),
}
_TIER_COUNTERS = {
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


#: Tenants with labels of their own; the rest is summed up as OTHERS, chunks without a tenant are labelled NONE.
MAX_LABELS = 50
OTHERS, NONE = "(others)", "(none)"
_TENANT_GAUGES = {
    "used_bytes": ("tanghulu_node_tenant_used_bytes", "bytes that are not free because of the tenant"),
    "quota_bytes": ("tanghulu_node_tenant_quota_bytes", "bytes that the tenant may hold; 0: no bound"),
    "cluster_quota_bytes": (
        "tanghulu_node_tenant_cluster_quota_bytes",
        "bytes that the tenant may hold on all nodes together; 0: no bound",
    ),
    "num_chunks": ("tanghulu_node_tenant_chunks", "ranges that the tenant holds"),
}
_TENANT_COUNTERS = {
    "hits": ("tanghulu_node_tenant_hits", "chunks that a get of the tenant found"),
    "hit_bytes": ("tanghulu_node_tenant_hit_bytes", "bytes of the chunks that a get of the tenant found"),
    "misses": ("tanghulu_node_tenant_misses", "keys that a get of the tenant did not find"),
    "evictions": ("tanghulu_node_tenant_evictions", "chunks of the tenant evicted from memory"),
    "evicted_bytes": ("tanghulu_node_tenant_evicted_bytes", "bytes of the tenant's chunks evicted"),
}
_TENANT_FIGURES = (*_TENANT_GAUGES, *_TENANT_COUNTERS)


@dataclass
class TrafficCounters:
    """Payload bytes by carrier (inline, write buffer, shm, tcp), from the clients' point of view."""

    bytes_read: dict[str, int] = field(default_factory=lambda: {"inline": 0, "shm": 0, "tcp": 0})
    bytes_written: dict[str, int] = field(default_factory=lambda: {"inline": 0, "shm": 0, "tcp": 0})


class NodeCollector(Collector):
    """The node's own figures."""

    def __init__(
        self, state: NodeState, traffic: Callable[[], TrafficCounters], num_sessions: Callable[[], int]
    ) -> None:
        self._state = state
        self._traffic = traffic
        self._num_sessions = num_sessions

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the node."""
        state, space, traffic = self._state, self._state.chunks.space, self._traffic()
        yield from _counters(_NODE_COUNTERS, state.counters)
        yield _labelled_counter(
            "tanghulu_node_evictions_by_reason", "the evictions, by reason", "reason", state.counters.evictions_by
        )
        for name, (text, read) in _NODE_GAUGES.items():
            yield GaugeMetricFamily(name, text, read(state))
        yield GaugeMetricFamily("tanghulu_node_sessions", "connected clients", self._num_sessions())
        yield CounterMetricFamily("tanghulu_node_moves", "chunks moved to make room in one piece", space.num_moved)
        yield CounterMetricFamily("tanghulu_node_moved_bytes", "bytes of the chunks moved", space.moved_bytes)
        yield CounterMetricFamily("tanghulu_node_write_buffer_puts", "chunks that came by one", state.buffers.num_taken)
        yield _labelled_counter(
            "tanghulu_node_read_bytes", "payload bytes read by clients", "transport", traffic.bytes_read
        )
        yield _labelled_counter(
            "tanghulu_node_written_bytes", "payload bytes written by clients", "transport", traffic.bytes_written
        )


class TierCollector(Collector):
    """The figures of the SSD tier."""

    def __init__(self, in_memory: NodeCounters, tier: SsdTier) -> None:
        self._in_memory = in_memory
        self._tier = tier

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the tier."""
        tier, counters = self._tier, self._tier.counters
        yield from _counters(_TIER_COUNTERS, counters)
        hits = {"memory": max(self._in_memory.hits - counters.hits, 0), "ssd": counters.hits}
        yield _labelled_counter("tanghulu_node_tier_hits", "chunks that a get found, by tier", "tier", hits)
        yield _labelled_counter(
            "tanghulu_node_ssd_admissions",
            "chunks evicted from memory, by what the SSD tier did",
            "verdict",
            counters.admissions,
        )
        yield GaugeMetricFamily("tanghulu_node_ssd_capacity_bytes", "bytes the file can hold", tier.capacity_bytes)
        yield GaugeMetricFamily("tanghulu_node_ssd_used_bytes", "bytes of the file that are not free", tier.used_bytes)
        yield GaugeMetricFamily("tanghulu_node_ssd_chunks", "chunks on the SSD", len(tier.state))
        yield GaugeMetricFamily("tanghulu_node_ssd_queued_bytes", "bytes on their way down", tier.queued_bytes)


class TenantCollector(Collector):
    """The figures of the tenants: labels for the largest ones, and one for all others together."""

    def __init__(self, usage: Callable[[], list[TenantFigures]]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the tenants."""
        rows = labelled(self._usage())
        families: list[tuple[str, GaugeMetricFamily | CounterMetricFamily]] = [
            *((name, GaugeMetricFamily(*of, labels=["tenant"])) for name, of in _TENANT_GAUGES.items()),
            *((name, CounterMetricFamily(*of, labels=["tenant"])) for name, of in _TENANT_COUNTERS.items()),
        ]
        for name, family in families:
            for label, usage in rows.items():
                family.add_metric([label], getattr(usage, name))
            yield family


def labelled(usages: list[TenantFigures]) -> dict[str, TenantFigures]:
    """Return the rows by label, at most ``MAX_LABELS`` + 1."""
    by_size = sorted(usages, key=lambda usage: (-usage.used_bytes, usage.tenant))
    rows = {usage.tenant or NONE: usage for usage in by_size[:MAX_LABELS]}
    rest = by_size[MAX_LABELS:]
    if rest:
        rows[OTHERS] = TenantFigures(
            OTHERS, **{name: sum(getattr(usage, name) for usage in rest) for name in _TENANT_FIGURES}
        )
    return rows


def _counters(names: Mapping[str, tuple[str, str]], counters: Any) -> Iterator[Metric]:
    for attribute, (name, text) in names.items():
        yield CounterMetricFamily(name, text, value=getattr(counters, attribute))


def _labelled_counter(name: str, text: str, label: str, values: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for of, value in values.items():
        family.add_metric([of.value if isinstance(of, Enum) else of], value)
    return family


def wait_collector(waits: Latencies[WaitEnd]) -> Collector:
    """Return a collector of the times that puts waited for room."""
    text = "how long puts waited for leases to end, by how that ended (lease_waits counts them as they begin)"
    return HistogramCollector(waits, "tanghulu_node_lease_wait_seconds", text, "outcome", lambda end: end.value)
