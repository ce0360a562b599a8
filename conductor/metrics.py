"""The conductor's metric names, with their units, in one place."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PREFIX = "tanghulu_conductor_"
_GRPC = ("method", "status", "model")


class ConductorMetrics:
    """Metrics updated by the dispatcher, the HTTP layer and the gRPC API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(_PREFIX + name, text, buckets=_SECONDS, registry=registry)

        self.requests = counter(
            "requests", "Sequences that ended, by outcome: stop, length, abort, or an error's code", "outcome"
        )
        self.grpc_requests = counter("grpc_requests", "Calls of the gRPC API that were answered", *_GRPC)
        self.grpc_seconds = Histogram(
            _PREFIX + "grpc_request_seconds",
            "From a gRPC call's beginning to the end of its answer",
            _GRPC,
            buckets=_SECONDS,
            registry=registry,
        )
        self.refused_tokens = counter("refused_prompt_tokens", "Prompt tokens of sequences that were refused unbegun")
        self.ttft = histogram("ttft_seconds", "From a sequence's arrival to its first token")
        self.tbt = histogram("tbt_seconds", "Between two steps that brought tokens of one sequence")
        self.e2e = histogram("request_seconds", "From the arrival of a sequence that was served to its end")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences that ended, if a worker had them")
        self.generated_tokens = counter("generated_tokens", "Tokens generated for clients")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that no worker had to compute")
        self.explained_tokens = counter(
            "explained_prompt_tokens",
            "Prompt tokens by source (worker, peer, store, ssd) or by the cause of computing them, and by API key",
            *("model", "key", "reason"),
        )
        self.migrations = Counter(
            "tanghulu_migrations",
            "Moves of requests that lost their worker: before or behind their first token, how exactly the text goes "
            "on, and what became of them",
            ("model", "kind", "exactness", "outcome"),
            registry=registry,
        )
        self.pause = Histogram(
            "tanghulu_migration_pause_seconds",
            "From the loss of a request's worker to its next token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.carried_tokens = Counter(
            "tanghulu_migration_tokens", "Generated tokens that moved along with requests", registry=registry
        )
        self.phases = Histogram(
            "tanghulu_request_phase_seconds",
            "Where the time of requests went, by how they ended: served, aborted, refused, failed",
            ("model", "phase", "status"),
            buckets=(0.0001, 0.0005, *_SECONDS),
            registry=registry,
        )
        self.hot_chunks = counter("hot_chunks", "Chunks of hot prefixes that the store was asked to copy ahead")
        self.hand_overs = counter("hand_overs", "Requests whose KV went from a prefill to a decode worker")
        self.in_flight = gauge("requests_in_flight", "Sequences under way at workers")
        self.peer_requests = gauge("peer_requests", "Sequences of other conductors that count here")
        self.queued = gauge("requests_queued", "Sequences that wait for a place or for a worker")
        self.workers = gauge("workers", "Connected workers", "worker_role")
        self.recorded = counter("recorded_requests", "Requests of --record: written, or dropped", "outcome")
        self.curve = gauge(
            "curve_cached_share",
            "Share of prompt tokens that would be cached at this multiple of the memory, as of the last look",
            *("model", "eviction", "size"),
        )
        self.curve_requests = counter("curve_requests", "Ended requests of the curves: counted, or dropped", "outcome")
        self.index_lag = gauge("prefix_index_waiting_blocks", "Blocks of events that the index does not have yet")
        self.index_blocks = gauge("prefix_index_blocks", "Distinct blocks that the prefix index knows", "holders")

    def recorded_requests(self, num_written: int, num_dropped: int) -> None:
        """Count requests of a recorded trace."""
        self.recorded.labels("written").inc(num_written)
        self.recorded.labels("dropped").inc(num_dropped)
