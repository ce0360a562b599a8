from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.rpc.latency import NUM_BUCKETS, Latencies, LatencyCollector


@pytest.mark.parametrize(
    ("seconds", "bounds"),
    [(0.0, (0, 1e-6)), (3e-6, (1e-6, 4e-6)), (5e-6, (4e-6, 16e-6)), (0.1, (0.065536, 0.262144)), (100.0, (16.7, 1e9))],
)
def test_a_call_is_counted_from_its_bucket_on(seconds: float, bounds: tuple[float, float]) -> None:
    latencies, registry = Latencies(), CollectorRegistry()
    registry.register(LatencyCollector(latencies))
    latencies.took("put", seconds)
    (family,) = [each for each in registry.collect() if each.name == "tanghulu_rpc_seconds"]
    buckets = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    assert len(buckets) == NUM_BUCKETS + 1
    assert all(value == (end > bounds[0] * 1.01) for end, value in buckets.items())
    assert min(end for end, value in buckets.items() if value) >= bounds[1] * 0.99 or bounds[1] == 1e9
    assert {s.labels["method"] for s in family.samples} == {"put"}
    assert registry.get_sample_value("tanghulu_rpc_seconds_count", {"method": "put"}) == 1
    assert registry.get_sample_value("tanghulu_rpc_seconds_sum", {"method": "put"}) == pytest.approx(seconds)
