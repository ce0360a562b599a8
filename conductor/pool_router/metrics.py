"""The global router's metric names, in one place."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

_PREFIX = "tanghulu_router_"


class PoolMetrics:
    """Counters of forwarded requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self.requests = counter("requests", "Generations, by the pools that served them", "prefill", "decode")
        self.retries = counter("retries", "Attempts that a conductor refused (429, 502, 503)", "pool")
        self.unprimed = counter("unprimed", "Generations whose prefill pool could not be reached: decode did the whole")
