"""The worker's metric names, and nothing else: each help text gives the meaning."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tanghulu.workers.engine.kv_layout import BlockShape
from tanghulu.workers.engine.thread import EngineLoad, StepReport

_STEP_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5)
_TRANSFER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class WorkerMetrics:
    """All figures of one worker; threads may update them."""

    def __init__(self, registry: CollectorRegistry, shape: BlockShape, num_blocks: int) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tanghulu_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tanghulu_worker_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tanghulu_worker_{name}", text, labels, buckets=buckets, registry=registry)

        self.computed_tokens = counter("computed_tokens", "positions that the model computed")
        self.generated_tokens = counter("generated_tokens", "tokens that were sampled")
        self.drafted_tokens = counter("drafted_tokens", "tokens that were proposed ahead (--speculative) and computed")
        self.accepted_tokens = counter("accepted_tokens", "proposed tokens that became text")
        self.prefix_tokens = counter("prefix_tokens", "prompt tokens that were not computed, by source", "source")
        self.preemptions = counter("preemptions", "requests that gave their blocks back")
        self.preempted_blocks = counter(
            "preempted_blocks", "blocks of preempted requests, by what became of them", "to"
        )
        self.requests = counter("requests", "requests by how they ended here", "outcome")
        self.step_seconds = histogram("step_seconds", "time of an engine step", _STEP_BUCKETS)
        self.fetch_seconds = histogram("fetch_seconds", "time to load a prefix", _TRANSFER_BUCKETS, "source")
        self.fetch_bytes = counter("fetch_bytes", "KV loaded instead of computed", "source")
        self.fetch_failures = counter("fetch_failures", "prefixes that had to be computed after all", "source")
        self.store_bytes = counter("store_bytes", "KV written to the store")
        self.store_failures = counter("store_failures", "blocks that could not be written to the store")
        self.store_refused = counter("store_refused", "blocks in the store that were not signed by this cluster")
        self.store_skipped = counter("store_skipped", "blocks not written because too many were under way")
        self.store_dropped = counter("store_dropped", "deferred blocks that were dropped for newer ones")
        self.store_deferred_blocks = gauge("store_deferred_blocks", "blocks to be written when the engine is idle")
        self.store_pending_blocks = gauge("store_pending_blocks", "blocks on their way to the store")
        self.exports = gauge("exports", "prefills that hold KV for another worker")
        self.exports_expired = counter(
            "exports_expired", "exports that were given back because nobody fetched them in time"
        )
        self.export_quarantined_bytes = gauge(
            "export_quarantined_bytes", "KV that no lease covers any more and a reader that maps it may still read"
        )
        self.export_bytes = counter("export_bytes", "KV read from here by other workers")
        self.requests_running = gauge("requests_running", "requests that compute")
        self.requests_waiting = gauge("requests_waiting", "requests that hold no blocks yet")
        self.requests_fetching = gauge("requests_fetching", "requests whose prefix is being loaded")
        self.blocks_in_use = gauge("blocks_in_use", "blocks that requests or exports hold")
        self.blocks_cached = gauge("blocks_cached", "blocks that nobody holds but that can be matched")
        self.blocks_in_transfer = gauge("blocks_in_transfer", "blocks that a transfer writes")
        gauge("blocks_capacity", "blocks of the KV cache").set(num_blocks)
        gauge("block_bytes", "bytes of one block").set(shape.block_bytes)
        token_bytes = gauge("kv_token_bytes", "bytes of KV of one token, by its type", "dtype")
        token_bytes.labels(shape.dtype).set(shape.block_bytes / shape.block_tokens)

    def report(self, reports: Sequence[StepReport]) -> None:
        """Count the steps since the last call."""
        computed = preempted = generated = drafted = accepted = 0
        for report in reports:
            result = report.result
            if not result.idle:
                computed += result.num_computed_tokens
                preempted += len(result.preempted)
                drafted += result.num_drafted_tokens
                accepted += result.num_accepted_tokens
                timings = result.timings
                self.step_seconds.observe(timings.schedule_s + timings.forward_s + timings.sample_s)
            for output in result.outputs:
                generated += len(output.tokens)
                if output.finish is not None:
                    self.requests.labels(output.finish.value).inc()
        self.computed_tokens.inc(computed)
        self.preemptions.inc(preempted)
        self.generated_tokens.inc(generated)
        self.drafted_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
        self.load(reports[-1].load)

    def load(self, load: EngineLoad) -> None:
        self.requests_running.set(load.shared.num_running)
        self.requests_waiting.set(load.shared.num_waiting - load.num_fetching)
        self.requests_fetching.set(load.num_fetching)
        self.blocks_in_use.set(load.blocks_in_use)
        self.blocks_cached.set(load.blocks_cached)
        self.blocks_in_transfer.set(load.blocks_in_transfer)
