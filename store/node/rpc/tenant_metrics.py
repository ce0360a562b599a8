"""The metric names of a node's tenants. Labels are bounded: the tenants that hold most, all others as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.store.protocol.messages import TenantFigures

#: Tenants with labels of their own; the rest is summed up as OTHERS, chunks of no tenant are called NONE.
MAX_LABELS = 50
OTHERS, NONE = "(others)", "(none)"
_GAUGES = {
    "used_bytes": ("tanghulu_node_tenant_used_bytes", "bytes that are not free because of the tenant"),
    "quota_bytes": ("tanghulu_node_tenant_quota_bytes", "bytes that the tenant may hold; 0: no bound"),
    "cluster_quota_bytes": (
        "tanghulu_node_tenant_cluster_quota_bytes",
        "bytes that the tenant may hold on all nodes together; 0: no bound",
    ),
    "num_chunks": ("tanghulu_node_tenant_chunks", "ranges that the tenant holds"),
}
_COUNTERS = {
    "hits": ("tanghulu_node_tenant_hits", "chunks that a get of the tenant found"),
    "hit_bytes": ("tanghulu_node_tenant_hit_bytes", "bytes of the chunks that a get of the tenant found"),
    "misses": ("tanghulu_node_tenant_misses", "keys that a get of the tenant did not find"),
    "evictions": ("tanghulu_node_tenant_evictions", "chunks of the tenant evicted from memory"),
    "evicted_bytes": ("tanghulu_node_tenant_evicted_bytes", "bytes of the tenant's chunks evicted"),
}
_FIGURES = (*_GAUGES, *_COUNTERS)


class TenantCollector(Collector):
    """Reads the book when Prometheus asks."""

    def __init__(self, usage: Callable[[], list[TenantFigures]]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """All metrics of the tenants."""
        rows = labelled(self._usage())
        families: list[tuple[str, GaugeMetricFamily | CounterMetricFamily]] = [
            *((name, GaugeMetricFamily(*of, labels=["tenant"])) for name, of in _GAUGES.items()),
            *((name, CounterMetricFamily(*of, labels=["tenant"])) for name, of in _COUNTERS.items()),
        ]
        for name, family in families:
            for label, usage in rows.items():
                family.add_metric([label], getattr(usage, name))
            yield family


def labelled(usages: list[TenantFigures]) -> dict[str, TenantFigures]:
    """label -> what is told under it, at most ``MAX_LABELS`` + 1."""
    by_size = sorted(usages, key=lambda usage: (-usage.used_bytes, usage.tenant))
    rows = {usage.tenant or NONE: usage for usage in by_size[:MAX_LABELS]}
    rest = by_size[MAX_LABELS:]
    if rest:
        rows[OTHERS] = TenantFigures(OTHERS, **{name: sum(getattr(usage, name) for usage in rest) for name in _FIGURES})
    return rows
