"""The metric names of a store node, and the one place that reads them off the node's state when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.rpc.latency import HistogramCollector, Latencies
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.writes.puts import WaitEnd

_COUNTERS = {
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


@dataclass
class TrafficCounters:
    """Payload bytes by carrier (inline, write buffer, shm, tcp), from the clients' point of view."""

    bytes_read: dict[str, int] = field(default_factory=lambda: {"inline": 0, "shm": 0, "tcp": 0})
    bytes_written: dict[str, int] = field(default_factory=lambda: {"inline": 0, "shm": 0, "tcp": 0})


class NodeCollector(Collector):
    """Reads the figures when Prometheus asks (from the metrics thread: plain attribute reads only)."""

    def __init__(
        self, state: NodeState, traffic: Callable[[], TrafficCounters], num_sessions: Callable[[], int]
    ) -> None:
        self._state, self._chunks, self._space = state, state.chunks, state.chunks.space
        self._traffic = traffic
        self._num_sessions = num_sessions

    def collect(self) -> Iterator[Metric]:
        """All metrics of the node."""
        state, buffers, chunks, counters = self._state, self._state.buffers, self._chunks, self._state.counters
        for name, (metric, text) in _COUNTERS.items():
            yield CounterMetricFamily(metric, text, value=getattr(counters, name))
        evictions = CounterMetricFamily(
            "tanghulu_node_evictions_by_reason", "the evictions, by reason", labels=["reason"]
        )
        for reason, number in counters.evictions_by.items():
            evictions.add_metric([reason.value], number)
        yield evictions
        yield GaugeMetricFamily("tanghulu_node_capacity_bytes", "bytes the node can hold", chunks.capacity_bytes)
        yield GaugeMetricFamily("tanghulu_node_used_bytes", "bytes that are not free", chunks.used_bytes)
        yield GaugeMetricFamily(
            "tanghulu_node_largest_free_bytes", "the longest range that is free", counters.largest_free_bytes
        )
        moved, moved_bytes = self._space.num_moved, self._space.moved_bytes
        yield CounterMetricFamily("tanghulu_node_moves", "chunks moved to make room in one piece", value=moved)
        yield CounterMetricFamily("tanghulu_node_moved_bytes", "bytes of the chunks moved", value=moved_bytes)
        yield GaugeMetricFamily("tanghulu_node_chunks", "chunks that can be found", len(chunks))
        yield GaugeMetricFamily("tanghulu_node_leases", "leases that are not over", len(state.leases))
        yield GaugeMetricFamily("tanghulu_node_waiting_puts", "puts that wait for room", len(state.waiters))
        yield GaugeMetricFamily("tanghulu_node_sessions", "connected clients", self._num_sessions())
        yield GaugeMetricFamily("tanghulu_node_write_buffers", "ranges that clients write into", buffers.num_open)
        yield GaugeMetricFamily(
            "tanghulu_node_write_buffer_heads", "those that clients may still see", buffers.num_heads
        )
        yield CounterMetricFamily("tanghulu_node_write_buffer_puts", "chunks that came by one", value=buffers.num_taken)
        traffic = self._traffic()
        yield _by_transport("tanghulu_node_read_bytes", "payload bytes read by clients", traffic.bytes_read)
        yield _by_transport("tanghulu_node_written_bytes", "payload bytes written by clients", traffic.bytes_written)


def _by_transport(name: str, text: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["transport"])
    for transport, value in values.items():
        family.add_metric([transport], value)
    return family


def wait_collector(waits: Latencies[WaitEnd]) -> Collector:
    """How long puts waited for room."""
    text = "how long puts waited for leases to end, by how that ended (lease_waits counts them as they begin)"
    return HistogramCollector(waits, "tanghulu_node_lease_wait_seconds", text, "outcome", lambda end: end.value)


def register(registry: CollectorRegistry, collector: NodeCollector) -> None:
    """Publish the node's metrics in the process's registry."""
    registry.register(collector)
