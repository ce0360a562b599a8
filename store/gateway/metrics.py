"""The gateway's metric names, with their units, in one place."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
EVENTS_ROUTE = "/v1/events"
DASHBOARD_EVENTS_ROUTE = "/dashboard/events"
_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
_PREFIX = "tanghulu_gateway_"


class GatewayMetrics:
    """The gateway's counters, and gauges that read its state."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            _PREFIX + "requests",
            "Requests that were answered, by route and status",
            ("method", "route", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            _PREFIX + "request_seconds",
            "From a request's header to the end of its answer, by route; streams of events left out",
            ("method", "route"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.read_bytes = Counter(_PREFIX + "read_bytes", "Bytes of values that were sent", registry=registry)
        self.written_bytes = Counter(_PREFIX + "written_bytes", "Bytes of values that were put", registry=registry)

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answered request; ``status`` 0: the client had disconnected."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")
        self.requests.labels(method, route, str(status)).inc()
        if route not in (EVENTS_ROUTE, DASHBOARD_EVENTS_ROUTE):
            self.seconds.labels(method, route).observe(seconds)

    def note_call(self, name: str, status: str, seconds: float) -> None:
        """Count a call over gRPC; ``status`` is the name of gRPC's code."""
        self.requests.labels("gRPC", name, status).inc()
        self.seconds.labels("gRPC", name).observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge with the value returned by ``read``."""
        Gauge(_PREFIX + name, text, registry=self.registry).set_function(read)
