"""The metrics of the endpoint picker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "tanghulu_epp_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class PickerMetrics:
    """Counters of picks and refusals; gauges of endpoints and of requests in progress."""

    def __init__(self, registry: CollectorRegistry, num_ready: Callable[[], int], num_requests: Callable[[], int]):
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self._seconds = Histogram(
            _PREFIX + "pick_seconds",
            "Time from a request's body to its pick, by number of picks",
            buckets=_SECONDS,
            registry=registry,
        )
        self.refused = counter("refused", "Requests answered with an error, by its code", "code")
        self.unread = counter("unread", "Requests routed by load, by the reason why their prompt is unknown", "reason")
        self._moved = counter("moved", "Requests served by another endpoint than the first of their pick")
        self._unreported = counter("unreported", "Responses without the endpoint that served them")
        for name, text, value in (
            ("endpoints_ready", "Endpoints that pass their health checks", num_ready),
            ("requests_in_progress", "Requests picked and not ended", num_requests),
        ):
            Gauge(_PREFIX + name, text, registry=registry).set_function(value)

    def picked(self, seconds: float) -> None:
        """Count a pick."""
        self._seconds.observe(seconds)

    def served(self, first: str, served: str) -> None:
        """Count a response by the endpoint that ``served`` it; "" if the gateway reported none."""
        if not served:
            self._unreported.inc()
        elif served != first:
            self._moved.inc()
