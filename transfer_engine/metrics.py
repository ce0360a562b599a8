"""The transfer engine's metrics, read from its objects on each scrape, in every process that has such objects."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.transfer_engine.core.paths import LATENCY_BOUNDS_S, Path, PathState, PathStats
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.server import SegmentServer

#: Label of a path; the figures of its streams are added up.
_LABELS = ("segment", "transport", "peer", "device")
_COUNTERS = {
    "num_bytes": ("tanghulu_transfer_bytes", "payload that arrived"),
    "num_slices": ("tanghulu_transfer_slices", "slices that arrived"),
    "num_lost": ("tanghulu_transfer_retries", "slices that their path lost, and that were tried again or given up"),
    "num_errors": ("tanghulu_transfer_errors", "times that a path broke or stalled"),
    "num_pauses": ("tanghulu_transfer_pauses", "times that a path was paused"),
    "num_mismatches": ("tanghulu_transfer_checksum_mismatches", "slices and requests that arrived changed"),
}
_GAUGES = {
    "in_flight_bytes": ("tanghulu_transfer_in_flight_bytes", "payload under way"),
    "in_flight_slices": ("tanghulu_transfer_in_flight_slices", "slices under way"),
    "bytes_per_s": ("tanghulu_transfer_bytes_per_second", "rate that was measured last; 0: none"),
}
_LATENCY = ("tanghulu_transfer_slice_seconds", "time from a slice's post to its arrival")
_PAUSED = ("tanghulu_transfer_paused_paths", "streams that are left alone for a while")
_BOUNDS = [*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf"]


class EngineCollector(Collector):
    """Publishes the activity of a process's TransferEngine, by path, while the segment is open."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of all paths."""
        paths = self._by_label()
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, found in paths.items():
                counter.add_metric(labels, sum(getattr(stats, field) for _, stats in found))
            yield counter
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, found in paths.items():
                gauge.add_metric(labels, sum(getattr(stats, field) for _, stats in found))
            yield gauge
        paused = GaugeMetricFamily(*_PAUSED, labels=_LABELS)
        latency = HistogramMetricFamily(*_LATENCY, labels=_LABELS)
        for labels, found in paths.items():
            paused.add_metric(labels, sum(state is not PathState.UP for state, _ in found))
            latency.add_metric(labels, _buckets(found), sum(stats.latency_sum_s for _, stats in found))
        yield paused
        yield latency

    def _by_label(self) -> dict[tuple[str, ...], list[tuple[PathState, PathStats]]]:
        paths: dict[tuple[str, ...], list[tuple[PathState, PathStats]]] = {}
        for remote in self._engine.open_segments():
            for path, state, stats in remote.path_stats():
                paths.setdefault((remote.name, *_label(path)), []).append((state, stats))
        return paths


class ServerCollector(Collector):
    """Publishes the activity of peers at a process's SegmentServer."""

    def __init__(self, server: SegmentServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the segment."""
        server, admission = self._server, self._server.admission
        connections = GaugeMetricFamily("tanghulu_segment_connections", "open connections", labels=["transport"])
        for transport, number in server.num_connections.items():
            connections.add_metric([transport], number)
        yield connections
        for name, text, figures in (
            ("tanghulu_segment_read_bytes", "payload read by peers through this process", server.bytes_read),
            ("tanghulu_segment_written_bytes", "payload written by peers through this process", server.bytes_written),
        ):
            family = CounterMetricFamily(name, text, labels=["transport"])
            for transport, number in figures.items():
                family.add_metric([transport], number)
            yield family
        for name, text, number in (
            ("tanghulu_segment_refused", "connections and slices that were refused", admission.num_refused),
            ("tanghulu_segment_fenced", "connections that their clients gave up", admission.num_fenced),
            ("tanghulu_segment_notices", "notices handed to the owner's program", admission.num_notices),
            ("tanghulu_segment_checksum_mismatches", "verified writes that landed changed", admission.num_mismatches),
        ):
            yield CounterMetricFamily(name, text, value=number)


def _label(path: Path) -> tuple[str, str, str]:
    return (path.transport, path.endpoint.address, path.local_device)


def _buckets(found: list[tuple[PathState, PathStats]]) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus counts: each includes those before it."""
    total, buckets = 0, []
    for index, bound in enumerate(_BOUNDS):
        total += sum(stats.latencies[index] for _, stats in found)
        buckets.append((bound, float(total)))
    return buckets
