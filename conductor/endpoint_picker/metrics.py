"""The metrics of the endpoint picker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "tanghulu_epp_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class PickerMetrics:
    """Counters of picks and refusals; gauges of endpoints and of requests in progress."""

    def __init__(self, registry: CollectorRegistry, num_ready: Callable[[], int], num_requests: Callable[[], int]):
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        text = "Time from a request's body to its pick, by number of picks"
        self.pick_seconds = Histogram(_PREFIX + "pick_seconds", text, buckets=_SECONDS, registry=registry)
        self.refused = counter("refused", "Requests answered with an error, by its code", "code")
        self.unread = counter("unread", "Requests routed by load, by the reason why their prompt is unknown", "reason")
        self.moved = counter("moved", "Requests served by another endpoint than the first of their pick")
        self.unreported = counter("unreported", "Responses without the endpoint that served them")
        ready, running = "Endpoints that pass their health checks", "Requests picked and not ended"
        Gauge(_PREFIX + "endpoints_ready", ready, registry=registry).set_function(num_ready)
        Gauge(_PREFIX + "requests_in_progress", running, registry=registry).set_function(num_requests)
